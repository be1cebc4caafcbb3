// How the threads of the team share the work of an op: the numbers 0 to `end`, handed out in pieces.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "team.h"

namespace octavo {

class Shares {
 public:
  // In order, to whichever thread asks first.
  void start_in_order(int64_t end, int64_t piece) {
    piece_ = piece;
    num_parts_ = 1;
    parts_[0].start(0, end);
  }
  // To each thread from a part of its own first, the same from op to op: the rows that one op left in a core's cache are
  // those that the core works on in the next. Then from what the others have left, so that nobody waits for a thread
  // that another process holds up. Pieces begin at multiples of `piece`.
  void start(int64_t end, int64_t piece) {
    piece_ = piece;
    num_parts_ = std::min(team_size(), kMostParts);
    const int64_t pieces = (end + piece - 1) / piece;
    const auto begin_of = [&](int64_t part) { return std::min(end, pieces * part / num_parts_ * piece); };
    for (int part = 0; part < num_parts_; ++part) parts_[part].start(begin_of(part), begin_of(part + 1));
  }
  // The next piece, [*begin, *end); false where nothing is left.
  bool take(int64_t* begin, int64_t* end) {
    const int own = team_index();
    for (int i = 0; i < num_parts_; ++i)
      if (parts_[(own + i) % num_parts_].take(piece_, begin, end)) return true;
    return false;
  }

 private:
  class Part {
   public:
    void start(int64_t begin, int64_t end) {
      next_.store(begin, std::memory_order_relaxed);
      end_ = end;
    }
    bool take(int64_t piece, int64_t* begin, int64_t* end) {
      // Whoever comes late only reads, and leaves the line to those who work.
      if (next_.load(std::memory_order_relaxed) >= end_) return false;
      const int64_t first = next_.fetch_add(piece, std::memory_order_relaxed);
      if (first >= end_) return false;
      *begin = first;
      *end = std::min(first + piece, end_);
      return true;
    }

   private:
    alignas(64) std::atomic<int64_t> next_{0};
    int64_t end_ = 0;
  };
  static constexpr int kMostParts = 32;

  Part parts_[kMostParts];
  int num_parts_ = 1;
  int64_t piece_ = 1;
};

}  // namespace octavo
