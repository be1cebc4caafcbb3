// Where the keys and values of a context lie, and how they are fetched in time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace octavo {
namespace attention {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory that is taken once and grows when it must; aligned to a cache line.
class Floats {
 public:
  struct Piece {
    float** at;
    int64_t size;
  };
  // Point at pieces that lie one behind the other, each aligned too. What was there is lost.
  void lay_out(std::initializer_list<Piece> pieces) {
    int64_t floats = 0;
    for (const Piece& piece : pieces) floats += round_up(piece.size, 16);
    float* next = at_least(floats);
    for (const Piece& piece : pieces) {
      *piece.at = next;
      next += round_up(piece.size, 16);
    }
  }

  float* at_least(int64_t n) {
    if (static_cast<int64_t>(memory_.size()) < n + kSlack) memory_.resize(static_cast<size_t>(n + kSlack));
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (-address % 64) / sizeof(float);
  }

 private:
  static constexpr int64_t kSlack = 16;
  std::vector<float> memory_;
};

// One row's keys and values, from the first KV head of a task on.
template <class T>
struct Context {
  const T* keys;  // at slot 0
  const T* values;
  const int32_t* blocks;
  int64_t block_size;
  int64_t slot_stride;  // elements from one slot to the next
  int64_t head_dim;

  // Point at the tokens [begin, begin + count) in `memory`, keys or values.
  const T** locate(const T* memory, int64_t begin, int64_t count, const T** at) const {
    int64_t block = begin / block_size, offset = begin % block_size;
    while (count > 0) {
      const T* slot = memory + (blocks[block] * block_size + offset) * slot_stride;
      const int64_t here = std::min(block_size - offset, count);
      for (int64_t i = 0; i < here; ++i, slot += slot_stride) *at++ = slot;
      count -= here;
      ++block;
      offset = 0;
    }
    return at;
  }
};

// What is read after a chunk.
template <class T>
struct Next {
  const Context<T>* context;
  int64_t begin, count;
};

// How scores come from products.
struct Scores {
  float scale;
  float soft_cap;  // 0: none
};

// Fetches memory that will be read soon, a cache line at a time, in the order in which it lies: the tokens
// [token, end), `width` elements each. Into the second-level cache, as much more than the first holds is on its way.
template <class T>
class Ahead {
 public:
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));

  Ahead(const T* const* token, const T* const* end, int64_t width) : token_(token), end_(end), width_(width) {}

  // The next lines that hold `count` elements, while there are any.
  void fetch(int64_t count) {
    while (count > 0 && (left_ > 0 || begin_run())) {
      const int64_t now = std::min(count, left_);
#if defined(__GNUC__)
      const T* const at = at_;
      for (int64_t i = 0; i < now; i += kLine) __builtin_prefetch(at + i, 0, 2);
#endif
      at_ += round_up(now, kLine);
      left_ -= round_up(now, kLine);
      count -= now;
    }
  }

 private:
  const T* const* token_;
  const T* const* end_;
  const T* at_ = nullptr;
  int64_t width_, left_ = 0;

  // Tokens that lie one behind the other are one run.
  bool begin_run() {
    if (token_ == end_) return false;
    at_ = *token_++;
    left_ = width_;
    for (; token_ != end_ && *token_ == at_ + left_; ++token_) left_ += width_;
    return true;
  }
};

// The same, a few runs side by side: several pages on their way bring more than one after the other.
template <class T>
class AheadSideBySide {
 public:
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  static constexpr int64_t kTurn = 4 * kLine;
  static constexpr int kRuns = 4;
  static constexpr int kTokens = 16;

  AheadSideBySide(const T* const* token, const T* const* end, int64_t width)
      : token_(token), end_(end), width_(width) {}

  void fetch(int64_t count) {
    for (; count > 0; count -= kTurn) {
      if (turn_ == runs_ && !next_turn()) return;
      const T* const at = at_[turn_];
      const int64_t now = std::min(kTurn, left_[turn_]);
#if defined(__GNUC__)
      for (int64_t i = 0; i < now; i += kLine) __builtin_prefetch(at + i, 0, 2);
#endif
      at_[turn_] = at + now;
      left_[turn_] -= now;
      ++turn_;
    }
  }

 private:
  const T* const* token_;
  const T* const* end_;
  const T* at_[kRuns] = {};
  int64_t left_[kRuns] = {};
  int64_t width_;
  int turn_ = 0, runs_ = 0;

  bool next_turn() {
    turn_ = 0;
    int kept = 0;
    for (int i = 0; i < runs_; ++i)
      if (left_[i] > 0) {
        at_[kept] = at_[i];
        left_[kept++] = left_[i];
      }
    runs_ = kept;
    if (runs_ > 0) return true;
    for (; runs_ < kRuns && token_ != end_; ++runs_) {
      at_[runs_] = *token_++;
      left_[runs_] = width_;
      for (int n = 1; n < kTokens && token_ != end_ && *token_ == at_[runs_] + left_[runs_]; ++n, ++token_)
        left_[runs_] += width_;
    }
    return runs_ > 0;
  }
};

}  // namespace attention
}  // namespace octavo
