// The likeliest token of each row, while the products of a head come by: the logits themselves are never written.
//
// A thread keeps, for each row and lane, the highest value that it saw and its column; what the threads found is joined at
// the end. Columns are kept as float32, which holds whole numbers up to 2^24 exactly.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../native/csrc/lanes.h"

namespace octavo {
namespace {

// What a row came to: the higher the better, and of equals the lowest column; and whether a value was not finite.
class Likeliest {
 public:
  void begin() {
    best_.store(0, std::memory_order_relaxed);
    is_finite_.store(true, std::memory_order_relaxed);
  }
  void offer(float value, int64_t column) {
    const uint64_t offered = key(value, column);
    uint64_t best = best_.load(std::memory_order_relaxed);
    while (offered > best && !best_.compare_exchange_weak(best, offered, std::memory_order_relaxed)) {
    }
  }
  void spoil() { is_finite_.store(false, std::memory_order_relaxed); }
  int64_t column() const { return ~static_cast<uint32_t>(best_.load(std::memory_order_relaxed)); }
  bool is_finite() const { return is_finite_.load(std::memory_order_relaxed); }

 private:
  // Ordered as the values are; no value that is a number has key 0.
  static uint64_t key(float value, int64_t column) {
    uint32_t bits;
    value += 0.0f;  // -0 is no less than 0
    std::memcpy(&bits, &value, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(column));
  }

  std::atomic<uint64_t> best_;
  std::atomic<bool> is_finite_;
};

// What one thread has seen.
class Looking {
 public:
  void begin(int64_t rows) {
    if (seen_.size() < static_cast<size_t>(rows * kRow)) seen_.resize(static_cast<size_t>(rows * kRow));
    if (is_finite_.size() < static_cast<size_t>(rows)) is_finite_.resize(static_cast<size_t>(rows));
    std::fill_n(is_finite_.begin(), rows, uint8_t{1});
    for (int64_t row = 0; row < rows; ++row) {
      store(at(row), broadcast(kLowest));
      store(at(row) + kLanes, zero());
    }
  }

  // Look at the values of some columns from `column` on, `left` of them, in some rows, which are `stride` apart.
  void look(int64_t row, int64_t rows, const float* values, int64_t stride, Vec bias, int64_t column, int64_t left) {
    // 0 times what is not finite is NaN, which a sum keeps.
    Vec all = zero();
    for (int64_t r = 0; r < rows; ++r) {
      Vec x = add(load(values + r * stride), bias);
      all = fma(x, zero(), all);
      if (left < kLanes) x = first_of(x, left);
      float* const seen = at(row + r);
      const Vec best = load(seen);
      // Seldom, after the first few.
      if (mask_gt(x, best) == 0) continue;
      const Vec columns = add(load(kFirst), broadcast(static_cast<float>(column)));
      store(seen + kLanes, either_ge(best, x, load(seen + kLanes), columns));
      store(seen, either_ge(best, x, best, x));
    }
    if (is_sound(all)) return;
    for (int64_t r = 0; r < rows; ++r)
      if (!is_sound(mul(add(load(values + r * stride), bias), zero()))) is_finite_[static_cast<size_t>(row + r)] = 0;
  }

  void end(int64_t rows, Likeliest* found) {
    for (int64_t row = 0; row < rows; ++row) {
      if (!is_finite_[static_cast<size_t>(row)]) found[row].spoil();
      const float* const seen = at(row);
      for (int lane = 0; lane < kLanes; ++lane) found[row].offer(seen[lane], static_cast<int64_t>(seen[kLanes + lane]));
    }
  }

 private:
  static constexpr int64_t kRow = 2 * kLanes;
  static constexpr float kLowest = -std::numeric_limits<float>::infinity();
  alignas(64) inline static const float kFirst[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  std::vector<float> seen_;  // [rows][value, column][kLanes]
  std::vector<uint8_t> is_finite_;

  float* at(int64_t row) { return seen_.data() + row * kRow; }
  static bool is_sound(Vec x) { return mask_eq(x, x) == (1u << kLanes) - 1; }
  static Vec first_of(Vec x, int64_t count) {
    float lanes[kLanes];
    store(lanes, x);
    return load_part(lanes, count, kLowest);
  }
};

}  // namespace
}  // namespace octavo
