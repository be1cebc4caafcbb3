// Partitions of a context put together, from the first to the last.
#pragma once

#include <algorithm>
#include <cfloat>

#include "../native/csrc/simd.h"
#include "context.h"

namespace octavo {
namespace attention {

// A partition as one row has seen it.
struct Part {
  const float* sums;  // values, weighted
  float total;        // the weights' sum
  float maximum;      // score of weight 1
};

// All partitions so far.
struct Whole {
  float* sums;     // [rows][width]
  float* maximum;  // [rows]
  float* total;    // [rows]

  // Nothing seen. The maximum is not minus infinity: differences from it must not be NaN.
  void clear(int64_t rows, int64_t width) const {
    std::fill_n(sums, rows * width, 0.0f);
    std::fill_n(total, rows, 0.0f);
    std::fill_n(maximum, rows, -FLT_MAX);
  }

  // Put a partition of each of `count` rows, no more than kLanes, behind those before it. Not inlined, so that there is
  // one rounding of it.
  template <Vec (*exp)(Vec)>
  __attribute__((noinline)) void fold(int64_t row, int count, const Part* parts, int64_t width) const {
    float before[kLanes] = {}, added[kLanes] = {}, maxima[kLanes] = {}, totals[kLanes] = {}, part_totals[kLanes] = {};
    for (int i = 0; i < count; ++i) {
      before[i] = maximum[row + i];
      added[i] = parts[i].maximum;
      totals[i] = total[row + i];
      part_totals[i] = parts[i].total;
    }
    const Vec both = max(load(added), load(before));
    const Vec before_factors = exp(sub(load(before), both)), added_factors = exp(sub(load(added), both));
    store(totals, fma(added_factors, load(part_totals), mul(before_factors, load(totals))));
    store(maxima, both);
    store(before, before_factors);
    store(added, added_factors);
    for (int i = 0; i < count; ++i) {
      const Vec of_before = broadcast(before[i]), of_added = broadcast(added[i]);
      float* const to = sums + (row + i) * width;
      for (int64_t j = 0; j < width; j += kLanes)
        store(to + j, fma(of_added, load(parts[i].sums + j), mul(of_before, load(to + j))));
      maximum[row + i] = maxima[i];
      total[row + i] = totals[i];
    }
  }
};

}  // namespace attention
}  // namespace octavo
