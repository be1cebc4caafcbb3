// The likeliest tokens of a row of logits in a defined order, without sorting the vocabulary: for sampling and logprobs.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "native/csrc/lanes.h"

namespace octavo {

constexpr float kBelowAll = -std::numeric_limits<float>::infinity();

// One thread's arrays: grown once, kept.
template <class T>
T* at_least(std::vector<T>& array, int64_t size) {
  if (static_cast<int64_t>(array.size()) < size) array.resize(size + size / 4);
  return array.data();
}

// The highest of n numbers, NaN left out.
static inline float highest_of(const float* x, int64_t n) {
  constexpr int kSums = 4;
  Vec best[kSums];
  for (Vec& each : best) each = broadcast(kBelowAll);
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
    for (int v = 0; v < kSums; ++v) best[v] = max(load(x + i + v * kLanes), best[v]);
  for (; i < n; i += kLanes) best[0] = max(load_part(x + i, n - i, kBelowAll), best[0]);
  return max_lane(max(max(best[0], best[1]), max(best[2], best[3])));
}

// The index of the first of the highest of n numbers, 0 where all are NaN.
static inline int64_t first_highest(const float* x, int64_t n) {
  // The first block that holds it, then its place there.
  constexpr int64_t kBlock = 1024;
  float highest = kBelowAll;
  int64_t block = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const float best = highest_of(x + begin, n - begin < kBlock ? n - begin : kBlock);
    if (best > highest) {
      highest = best;
      block = begin;
    }
  }
  for (int64_t i = block; i < n; i += kLanes) {
    const uint32_t found = mask_eq(load_part(x + i, n - i, std::numeric_limits<float>::quiet_NaN()), broadcast(highest));
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

// Something with a place in an order, lowest key first, and a weight.
struct Ranked {
  double key;
  int64_t weight;
};

// Finds where, in order of keys, the running sum of weights reaches `need`, which is at least 1: returns the key there,
// and in *rest how much of it the items of that very key must give. The items are not kept. Expected time is linear.
static inline double key_at(Ranked* items, Ranked* spare, int64_t count, int64_t need, int64_t* rest) {
  for (;;) {
    const double a = items[0].key, b = items[count / 2].key, c = items[count - 1].key;
    const double pivot = std::fmax(std::fmin(a, b), std::fmin(std::fmax(a, b), c));
    // Lower ones go to the front of the spare array, higher ones to its back: no branch that cannot be foretold.
    int64_t lower = 0, higher = 0, below = 0, equal = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Ranked item = items[i];
      const bool is_lower = item.key < pivot, is_higher = item.key > pivot;
      spare[lower] = item;
      lower += is_lower;
      below += is_lower ? item.weight : 0;
      equal += is_lower || is_higher ? 0 : item.weight;
      spare[count - 1 - higher] = is_higher ? item : spare[count - 1 - higher];
      higher += is_higher;
    }
    if (need <= below) {
      count = lower;
    } else if (need <= below + equal || higher == 0) {
      *rest = need - below;
      return pivot;
    } else {
      need -= below + equal;
      // Exact arithmetic leaves the rest among the higher.
      spare += count - higher;
      items += count - higher;
      count = higher;
    }
    Ranked* const other = items;
    items = spare;
    spare = other;
  }
}

// Some tokens of a row, in ascending id.
struct Tokens {
  const float* logits;
  const int32_t* ids;
  int64_t count;
};

// Finds the k highest logits of rows, equals by ascending id. NaN is left out, and so there may be fewer than k.
class TopTokens {
 public:
  // k is from 1 to n. The result holds until the next call.
  Tokens find(const float* x, int64_t n, int64_t k) {
    const int64_t blocks = (n + kBlock - 1) / kBlock;
    float* maxima = at_least(maxima_, blocks * kLanes);
    for (int64_t block = 0; block < blocks; ++block) store(maxima + block * kLanes, block_maxima(x, n, block * kBlock));
    // Each of these maxima is one logit: the k-th highest of them is no higher than the k-th highest of all.
    const float least = 4 * k <= blocks * kLanes ? kth_highest(maxima, blocks * kLanes, k) : kBelowAll;
    const int64_t count = collect(x, n, maxima, least);
    if (count == 0) return {nullptr, nullptr, 0};
    int64_t equals;
    const float lowest = kth_highest(logits_.data(), count, k, &equals);
    int64_t kept = 0;
    for (int64_t i = 0; i < count && kept < k; ++i) {
      const float logit = logits_[i];
      if (!(logit > lowest || (logit == lowest && equals-- > 0))) continue;
      logits_[kept] = logit;
      ids_[kept++] = ids_[i];
    }
    return {logits_.data(), ids_.data(), kept};
  }

 private:
  static constexpr int kVecs = 32;
  static constexpr int64_t kBlock = kVecs * kLanes;

  // The highest of each lane in one block.
  static Vec block_maxima(const float* x, int64_t n, int64_t begin) {
    Vec best = broadcast(kBelowAll), other = best;
    if (begin + kBlock <= n) {
      for (int v = 0; v < kVecs; v += 2) {
        best = max(load(x + begin + v * kLanes), best);
        other = max(load(x + begin + (v + 1) * kLanes), other);
      }
    } else {
      for (int64_t i = begin; i < n; i += kLanes) best = max(load_part(x + i, n - i, kBelowAll), best);
    }
    return max(best, other);
  }

  float kth_highest(const float* values, int64_t n, int64_t k, int64_t* equals = nullptr) {
    Ranked* items = at_least(items_, n);
    for (int64_t i = 0; i < n; ++i) items[i] = {-static_cast<double>(values[i]), 1};
    int64_t rest;
    const double key = key_at(items, at_least(spare_, n), n, k, &rest);
    if (equals) *equals = rest;
    return static_cast<float>(-key);
  }

  int64_t collect(const float* x, int64_t n, const float* maxima, float least) {
    const Vec bound = broadcast(least);
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      if (!mask_ge(load(maxima + begin / kBlock * kLanes), bound)) continue;
      at_least(logits_, count + kBlock);
      at_least(ids_, count + kBlock);
      const int64_t end = begin + kBlock < n ? begin + kBlock : n;
      for (int64_t i = begin; i < end; i += kLanes) {
        uint32_t found = mask_ge(load_part(x + i, end - i, std::numeric_limits<float>::quiet_NaN()), bound);
        for (; found; found &= found - 1) {
          const int lane = __builtin_ctz(found);
          logits_[count] = x[i + lane];
          ids_[count++] = static_cast<int32_t>(i + lane);
        }
      }
    }
    return count;
  }

  std::vector<float> maxima_, logits_;
  std::vector<int32_t> ids_;
  std::vector<Ranked> items_, spare_;
};

}  // namespace octavo
