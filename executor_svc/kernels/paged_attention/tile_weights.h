// Softmax of the scores that tiles gave: weights in bfloat16, as the next product takes them.
#pragma once

#include <cfloat>
#include <limits>

#include "../native/csrc/lanes.h"
#include "fold.h"
#include "tile_layout.h"

namespace octavo {
namespace attention {

constexpr float kLog2E = 1.44269504f;

// 2 to the power of x, for x up to 127; 1 for 0, 0 below -126, NaN for NaN. The polynomial, of degree 4, is exact at 0,
// minimax elsewhere on [0, 1]: its relative error stays below 2^-18, far from what is left of a weight in bfloat16.
inline Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  // The rest above the whole number below: scalef takes that number itself.
  const Vec rest = _mm512_reduce_ps(x, 0x01);
  Vec y = fma(broadcast(0.013426687568f), rest, broadcast(0.052242469043f));
  y = fma(y, rest, broadcast(0.241280212998f));
  y = fma(y, rest, broadcast(0.693044841290f));
  y = fma(y, rest, broadcast(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_NLT_UQ), y, x);
#else
  return exp(mul(x, broadcast(0.693147181f)));
#endif
}

// ---- the largest and the sum of each of some vectors ----

#if defined(__AVX2__)
// In the same order for each of four.
template <class Op256, class Op128>
inline __m128 across(__m256 a, __m256 b, __m256 c, __m256 d, const Op256& op, const Op128& last) {
  const auto halves = [&](__m256 x, __m256 y) {
    return op(_mm256_blend_ps(x, y, 0xcc), _mm256_shuffle_ps(x, y, 0x4e));
  };
  const __m256 ab = halves(a, b), cd = halves(c, d);
  const __m256 quarters = op(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
  return last(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1));
}
template <class Op256, class Op128>
inline void across(const float* vectors, int begin, int end, float* to, const Op256& op, const Op128& last) {
  for (int i = begin / 4 * 4; i < end; i += 4) {
    __m256 x[4];
    for (int j = 0; j < 4; ++j) {
      const float* const from = vectors + (i + j) * kLanes;
      x[j] = _mm256_loadu_ps(from);
      if constexpr (kLanes == 16) x[j] = op(x[j], _mm256_loadu_ps(from + 8));
    }
    _mm_storeu_ps(to + i, across(x[0], x[1], x[2], x[3], op, last));
  }
}
// to[i] of the lanes of vector i, for i in [begin, end) and their neighbours among kTile.
inline void largest_of_each(const float* vectors, int begin, int end, float* to) {
  across(vectors, begin, end, to, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); },
         [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
inline void sum_of_each(const float* vectors, int begin, int end, float* to) {
  across(vectors, begin, end, to, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); },
         [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
#else
inline void largest_of_each(const float* vectors, int begin, int end, float* to) {
  for (int i = begin; i < end; ++i) to[i] = max_lane(load(vectors + i * kLanes));
}
inline void sum_of_each(const float* vectors, int begin, int end, float* to) {
  for (int i = begin; i < end; ++i) to[i] = sum_lanes(load(vectors + i * kLanes));
}
#endif

// Weights as the left factor that values, as they lie, take from the right: a tile multiplies pairs of neighbours,
// which here are two elements of one head. So each row has two lines of words: its weights in the lower halves, for the
// even elements, and in the upper ones, for the odd. Rounded to the nearest bfloat16, upwards where two are as near.
inline void store_weights(float* even, float* odd, Vec weight) {
#if defined(__AVX512F__)
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(weight), _mm512_set1_epi32(0x8000));
  _mm512_storeu_si512(even, _mm512_srli_epi32(rounded, 16));
  _mm512_storeu_si512(odd, _mm512_and_si512(rounded, broadcast_bits(0xffff0000u)));
#else
  uint32_t bits[kLanes];
  store(odd, weight);
  std::memcpy(bits, odd, sizeof bits);
  for (uint32_t& word : bits) word = (word + 0x8000u) >> 16;
  std::memcpy(even, bits, sizeof bits);
  for (uint32_t& word : bits) word <<= 16;
  std::memcpy(odd, bits, sizeof bits);
#endif
}
// Rows of a tile of weights.
constexpr int kWeightRows = kTile / 2;

// How weights come from products: 2 to the power of scale times the difference to the largest.
struct Softening {
  float scale;     // above 0
  float soft_cap;  // 0: none
  float before;    // what products are multiplied by before a cap is put on them and the largest is found
};

// What the rows of a tile see of a partition: [from, seen), ascending.
struct Sight {
  const int* from;
  const int* seen;
  // As far as whole tiles of tokens.
  int first(int row) const { return from[row] / kTile * kTile; }
  int last(int row) const { return (seen[row] + kTile - 1) / kTile * kTile; }
};

// The rows [begin, end) of a tile of scores, [kTile][kTokens]: weights, [kTile / kWeightRows][kTokens / kTile] tiles,
// each row's largest score and its sum of weights. What a row does not see has weight 0, as far as any of the rows sees
// something. `between` is called after every row.
template <int kTokens, class F>
inline void soften_tile(const Softening& by, const Sight& sight, int begin, int end, float* scores, float* weights,
                        float* total, float* maximum, const F& between) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  alignas(64) float vectors[kTile * kLanes], largest[kTile];
  const int first = sight.first(begin), last = sight.last(end - 1);
  for (int r = begin; r < end; ++r) {
    float* const row = scores + r * kTokens;
    const int own_first = sight.first(r), own_last = sight.last(r);
    if (by.before != 1.0f || by.soft_cap > 0)
      for (int j = own_first; j < own_last; j += kLanes) {
        const Vec cap = broadcast(by.soft_cap), score = mul(load(row + j), broadcast(by.before));
        store(row + j, by.soft_cap > 0 ? mul(cap, tanh(div(score, cap))) : score);
      }
    for (int j = own_first; j < sight.from[r]; ++j) row[j] = -kInfinity;
    for (int j = sight.seen[r]; j < own_last; ++j) row[j] = -kInfinity;
    Vec best = load(row + own_first);
    for (int j = own_first + kLanes; j < own_last; j += kLanes) best = max(best, load(row + j));
    store(vectors + r * kLanes, best);
  }
  // A NaN may or may not win here; it stays in its own weight below. Rows of nobody have what was there.
  largest_of_each(vectors, begin, end, largest);
  for (int r = begin; r < end; ++r) {
    const float top = largest[r] * by.scale;
    maximum[r] = top > -FLT_MAX ? top : -FLT_MAX;
    const float* const row = scores + r * kTokens;
    float* const to = weights + r / kWeightRows * kTokens * kTile + r % kWeightRows * 2 * kTile;
    const int own_first = sight.first(r), own_last = sight.last(r);
    const Vec scale = broadcast(by.scale), least = broadcast(-maximum[r]);
    Vec sum = zero();
    for (int j = own_first; j < own_last; j += kTile)
      for (int i = 0; i < kTile; i += kLanes) {
        const Vec weight = exp2(fma(load(row + j + i), scale, least));
        sum = add(sum, weight);
        store_weights(to + j * kTile + i, to + j * kTile + kTile + i, weight);
      }
    store(vectors + r * kLanes, sum);
    between();
    for (int j = first; j < own_first; j += kTile) std::fill_n(to + j * kTile, 2 * kTile, 0.0f);
    for (int j = own_last; j < last; j += kTile) std::fill_n(to + j * kTile, 2 * kTile, 0.0f);
  }
  sum_of_each(vectors, begin, end, largest);
  for (int r = begin; r < end; ++r) total[r] = largest[r];
}

}  // namespace attention
}  // namespace octavo
