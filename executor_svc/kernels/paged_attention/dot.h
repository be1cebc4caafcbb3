// Scores: query rows against the keys of some tokens.
//
// A query row is one query head at one query token. Its score of a token is kLanes running sums over the head, folded in
// one order, however many rows and tokens share the tile and whether a key is read where it lies or from a copy: a row's
// numbers do not depend on the rows beside it, bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../native/csrc/simd.h"
#include "context.h"

namespace octavo {
namespace attention {

// The same address, though the compiler does not know it: it neither keeps what it loaded from there in a register that a
// sum could have, nor works out several addresses in a vector.
template <class T>
inline const T* same_address(const T* p) {
#if defined(__GNUC__)
  asm("" : "+r"(p));
#endif
  return p;
}

// ---- the order in which the elements of a head are worked on ----

// bfloat16 come in twos: a word's lower half, then its upper half.
template <class T>
constexpr int kHalves = sizeof(T) == sizeof(bf16) ? 2 : 1;

// The elements of a head, rounded up to whole vectors.
template <class T>
int64_t width_of(int64_t head_dim) {
  return round_up(head_dim, kHalves<T> * kLanes);
}

// Where element i of a head lies in that order: float32 as they are; of bfloat16 first the lower halves, then the upper.
template <class T>
int64_t place_of(int64_t i, int64_t width) {
  return kHalves<T> == 1 ? i : i % 2 * (width / 2) + i / 2;
}

// A head in that order, widened, with zeros up to `width`.
template <class T>
void spread(const T* from, int64_t head_dim, int64_t width, float* to) {
  int64_t i = 0;
  for (; i + kHalves<T> * kLanes <= head_dim; i += kHalves<T> * kLanes) {
    if constexpr (kHalves<T> == 2) {
      const Bits both = load_bits(from + i);
      store(to + i / 2, low_halves(both));
      store(to + width / 2 + i / 2, high_halves(both));
    } else {
      store(to + i, load(from + i));
    }
  }
  for (; i < width; ++i) to[place_of<T>(i, width)] = i < head_dim ? widen(from[i]) : 0.0f;
}

// The reverse: `from` is in that order.
template <class T>
void gather(const float* from, int64_t head_dim, int64_t width, T* to) {
  int64_t i = 0;
  for (; i + kHalves<T> * kLanes <= head_dim; i += kHalves<T> * kLanes) {
    if constexpr (kHalves<T> == 2)
      store_halves(to + i, load(from + i / 2), load(from + width / 2 + i / 2));
    else
      store(to + i, load(from + i));
  }
  for (; i < head_dim; ++i) {
    if constexpr (kHalves<T> == 2)
      to[i] = to_bf16(from[place_of<T>(i, width)]);
    else
      to[i] = from[i];
  }
}

// ---- scores ----

// The sums of the lanes of four vectors, in the same order for each.
#if defined(__AVX2__)

// Of each four lanes the first two added to the last two: a's in front, b's behind.
inline __m256 sums_of_twos(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}
inline __m128 sums_of_lanes(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 quarters = _mm256_hadd_ps(sums_of_twos(a, b), sums_of_twos(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(quarters), _mm256_extractf128_ps(quarters, 1));
}
#if defined(__AVX512F__)
inline __m256 fold(Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }
#else
inline __m256 fold(Vec x) { return x; }
#endif
inline void store_scores(Vec a, Vec b, Vec c, Vec d, float scale, float* to) {
  _mm_storeu_ps(to, _mm_mul_ps(sums_of_lanes(fold(a), fold(b), fold(c), fold(d)), _mm_set1_ps(scale)));
}

#else

inline void store_scores(Vec a, Vec b, Vec c, Vec d, float scale, float* to) {
  const Vec* const sums[] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) {
    const Vec& x = *sums[i];
    to[i] = ((x[0] + x[2]) + (x[1] + x[3])) * scale;
  }
}

#endif

// Most rows of a tile, and the tokens of one of R rows: the registers hold sums for all, a vector of each row, and one of
// a key. Few sums alone would leave the multiply-add units waiting for their own results.
constexpr int kDotRows = 3;
template <int R>
constexpr int kDotTokens = R == 1 ? 8 : 4;

// scores[r * stride + j] = scale * (row r . key j), for the tokens of a tile; rows are `width` apart. The key of token j
// is at keys[j] + offset: T as it lies in memory, or float from spread.
template <int R, class T>
inline void dot_tile(const float* query, const T* const* keys, int64_t offset, int64_t width, float scale,
                     float* scores, int64_t stride) {
  constexpr int J = kDotTokens<R>;
  Vec sum[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) sum[r][j] = zero();
  const T* key[J];
  for (int j = 0; j < J; ++j) key[j] = same_address(keys[j] + offset);
  const int64_t part = width / kHalves<T>;
  int64_t i = 0;
  do {
    Vec row[R];
    for (int r = 0; r < R; ++r) row[r] = load(query + r * width + i);
    for (int j = 0; j < J; ++j) {
      Vec x;
      if constexpr (kHalves<T> == 2)
        x = low_halves(load_bits(key[j] + 2 * i));
      else
        x = load(key[j] + i);
      for (int r = 0; r < R; ++r) sum[r][j] = fma(row[r], x, sum[r][j]);
    }
    i += kLanes;
  } while (i < part);
  if constexpr (kHalves<T> == 2) {
    i = 0;
    do {
      Vec row[R];
      for (int r = 0; r < R; ++r) row[r] = load(query + r * width + part + i);
      for (int j = 0; j < J; ++j) {
        const Vec x = high_halves(load_bits(key[j] + 2 * i));
        for (int r = 0; r < R; ++r) sum[r][j] = fma(row[r], x, sum[r][j]);
      }
      i += kLanes;
    } while (i < part);
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; j += 4)
      store_scores(sum[r][j], sum[r][j + 1], sum[r][j + 2], sum[r][j + 3], scale, scores + r * stride + j);
}

// ---- rows dealt out to tiles ----

template <int R, class F>
void with_rows(int rows, const F& f) {
  if constexpr (R > 0) {
    if (rows == R)
      f.template operator()<R>();
    else
      with_rows<R - 1>(rows, f);
  }
}

// Call f<R>(row) for tiles of R <= most rows that together are [begin, end). Dealt out evenly: 7 are 4 and 3, not 6 and 1.
template <int most, class F>
void for_tiles(int begin, int end, const F& f) {
  int row = begin;
  for (int tiles = (end - begin + most - 1) / most; tiles > 0; --tiles) {
    const int rows = (end - row) / tiles;
    with_rows<most>(rows, [&]<int R>() { f.template operator()<R>(row); });
    row += rows;
  }
}

}  // namespace attention
}  // namespace octavo
