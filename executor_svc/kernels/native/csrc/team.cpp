#include "team.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void pause_briefly() { _mm_pause(); }
#else
static inline void pause_briefly() { std::this_thread::yield(); }
#endif

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread looks before it sleeps: several times the gap between two ops of a step.
constexpr auto kLookFor = std::chrono::microseconds(50);
constexpr int kTurnsBetweenClocks = 32;

// Look for `found` for a while; false where it did not come true.
template <class F>
bool look_for(const F& found) {
  const auto until = Clock::now() + kLookFor;
  do {
    for (int turn = 0; turn < kTurnsBetweenClocks; ++turn) {
      if (found()) return true;
      pause_briefly();
    }
  } while (Clock::now() < until);
  return found();
}

thread_local int index_of_thread = 0;

class Team {
 public:
  void resize(int size) {
    std::lock_guard<std::mutex> turn(callers_);
    if (size == size_) return;
    stop();
    stopping_ = false;
    size_ = size;
    const uint64_t round = gate_.load() / kRound;
    for (int index = 1; index < size; ++index)
      threads_.emplace_back([this, index, round] {
        index_of_thread = index;
        serve(round);
      });
  }

  void run(Work work, void* arguments) {
    // Two executors in one process, as in tests, take turns.
    std::lock_guard<std::mutex> turn(callers_);
    if (size_ == 1) return work(arguments);
    work_ = work;
    arguments_ = arguments;
    {
      // Under the lock, so that a thread on its way to sleep cannot miss it.
      std::lock_guard<std::mutex> lock(mutex_);
      gate_.store((gate_.load(std::memory_order_relaxed) / kRound + 1) * kRound + kOpen, std::memory_order_release);
    }
    wake_.notify_all();
    work(arguments);
    // All is handed out, as `work` has come back: whoever is not in by now is not waited for.
    gate_.fetch_sub(kOpen, std::memory_order_acq_rel);
    await_those_inside();
  }

  int size() const { return size_; }

 private:
  void serve(uint64_t seen) {
    while (await_round_after(&seen)) {
      if (!enter(seen)) continue;
      work_(arguments_);
      if ((gate_.fetch_sub(1, std::memory_order_acq_rel) & (kRound - 1)) == 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  // Waits for a round after `*seen`, which becomes it. False where the team is being stopped.
  bool await_round_after(uint64_t* seen) {
    const auto begun = [&] { return gate_.load(std::memory_order_acquire) / kRound != *seen; };
    if (!look_for(begun)) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || begun(); });
      if (!begun()) return false;
    }
    *seen = gate_.load(std::memory_order_acquire) / kRound;
    return true;
  }

  // Takes part in a round, if it still lets in: its work and arguments are there until all who are inside have left.
  bool enter(uint64_t round) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    while (gate / kRound == round && (gate & kOpen))
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  void await_those_inside() {
    const auto done = [&] { return (gate_.load(std::memory_order_acquire) & (kRound - 1)) == 0; };
    if (look_for(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, done);
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  int size_ = 1;
  std::vector<std::thread> threads_;
  Work work_ = nullptr;
  void* arguments_ = nullptr;
  // The number of the round, whether it lets threads in, and how many are inside, the caller apart.
  static constexpr uint64_t kOpen = 1 << 15, kRound = 1 << 16;
  alignas(64) std::atomic<uint64_t> gate_{0};
  bool stopping_ = false;
  std::mutex callers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
};

// Never destroyed: its threads may still look for work while the process ends.
Team& team() {
  static Team* const the_team = new Team;
  return *the_team;
}

}  // namespace

// What has been run since the process began: how others see that the device moves.
static std::atomic<int64_t> rounds_done{0};

void run_on_team(Work work, void* arguments) {
  team().run(work, arguments);
  rounds_done.fetch_add(1, std::memory_order_relaxed);
}
int64_t rounds() { return rounds_done.load(std::memory_order_relaxed); }
int team_size() { return team().size(); }
int team_index() { return index_of_thread; }

}  // namespace octavo

OCTAVO_EXPORT void octavo_set_threads(int count) { octavo::team().resize(count < 1 ? 1 : count); }
OCTAVO_EXPORT int octavo_threads() { return octavo::team_size(); }
OCTAVO_EXPORT int64_t octavo_rounds() { return octavo::rounds(); }
