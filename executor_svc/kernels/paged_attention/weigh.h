// Weighted sums of values.
//
// Every output is one running sum over tokens in order, however many query rows share the tile: a row's numbers do not
// depend on the rows beside it, bit for bit.
#pragma once

#include "dot.h"
#include "plan.h"

namespace octavo {
namespace attention {

// Most query rows of a tile: what the registers hold sums for, beside values and factors.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// Vectors side by side in a tile of R rows. Few rows alone would leave the multiply-add units waiting for their own
// results.
template <int R>
constexpr int kTileVectors = R == 1 ? 8 : R <= kTileRows / 2 ? 4 : 2;

// Some tokens' values of one KV head, and what is read soon after each.
template <class T>
struct Values {
  const T* const* at;  // of each token, as it lies in memory or from spread
  int64_t offset;      // elements from there to the head
  Ahead<T>* ahead;     // null: nothing is fetched ahead
};

// sums[r] += weights[r][j] * value j, for the tokens [begin, end), one at least, at the V vectors from `column` of the
// head in memory. Weights of a row are `stride` apart, its sums `width`, in the order of spread.
template <int R, int V, class T>
inline void value_tile(const float* weights, int64_t stride, const Values<T>& values, int64_t column, int begin, int end,
                       float* sums, int64_t width) {
  // Of bfloat16 every other vector is of the upper halves, whose sums lie in the second half of the width.
  const auto place = [&](int v) {
    if constexpr (kHalves<T> == 2)
      return column / 2 + v / 2 * kLanes + v % 2 * (width / 2);
    else
      return column + v * kLanes;
  };
  Vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = load(sums + r * width + place(v));
  const int64_t at = values.offset + column;
  int j = begin;
  do {
    if (values.ahead) values.ahead->fetch(V * kLanes);
    const T* const from = values.at[j] + at;
    const T* const again = same_address(from);
    const auto value = [&](int v) {
      if constexpr (kHalves<T> == 2) {
        if (v % 2) return high_halves(load_bits(again + v / 2 * 2 * kLanes));
        return low_halves(load_bits(from + v / 2 * 2 * kLanes));
      } else {
        return load(from + v * kLanes);
      }
    };
    // What there is less of stays in registers.
    if constexpr (R <= V) {
      Vec weight[R];
      for (int r = 0; r < R; ++r) weight[r] = broadcast(weights[r * stride + j]);
      for (int v = 0; v < V; ++v) {
        const Vec x = value(v);
        for (int r = 0; r < R; ++r) sum[r][v] = fma(weight[r], x, sum[r][v]);
      }
    } else {
      Vec x[V];
      for (int v = 0; v < V; ++v) x[v] = value(v);
      for (int r = 0; r < R; ++r) {
        const Vec weight = broadcast(weights[r * stride + j]);
        for (int v = 0; v < V; ++v) sum[r][v] = fma(weight, x[v], sum[r][v]);
      }
    }
  } while (++j < end);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + r * width + place(v), sum[r][v]);
}

// The same over all columns, as many at once as go. `width` is one of width_of<T>.
template <int R, class T, int V = kTileVectors<R>>
void value_columns(const float* weights, int64_t stride, const Values<T>& values, int64_t column, int begin, int end,
                   float* sums, int64_t width) {
  if (begin >= end) return;
  for (; column + V * kLanes <= width; column += V * kLanes)
    value_tile<R, V>(weights, stride, values, column, begin, end, sums, width);
  if constexpr (V > kHalves<T>)
    if (column < width) value_columns<R, T, V / 2>(weights, stride, values, column, begin, end, sums, width);
}

// R rows of which row r sees the tokens [from[r], seen[r]), both ascending, as far as they lie in [begin, end): what all
// see is walked together, what is left row by row. A token that a row does not see is never multiplied, as it may be NaN.
template <int R, class T>
void value_rows(const float* weights, int64_t stride, const Values<T>& values, const int* from, const int* seen,
                int begin, int end, float* sums, int64_t width) {
  const int common_end = std::clamp(seen[0], begin, end), common_begin = std::clamp(from[R - 1], begin, common_end);
  const Values<T> once{values.at, values.offset, nullptr};
  const auto alone = [&](int first, int last) {
    for (int r = 0; r < R; ++r)
      value_columns<1>(weights + r * stride, stride, once, 0, std::max(from[r], first), std::min(seen[r], last),
                       sums + r * width, width);
  };
  if (from[0] < common_begin) alone(begin, common_begin);
  value_columns<R>(weights, stride, values, 0, common_begin, common_end, sums, width);
  if (seen[R - 1] > common_end) alone(common_end, end);
}

}  // namespace attention
}  // namespace octavo
