// One chunk of a context against many query rows: scores, softmax weights, weighted sums of values.
//
// A query row is one query head at one query token. Every score is a running sum over head_dim in order, every output a
// running sum over tokens in order, however many query rows share the tile: a row's numbers do not depend on the rows
// beside it, bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../native/csrc/simd.h"

namespace octavo {
namespace attention {

// Tokens of a chunk: contexts are walked at multiples of it.
constexpr int kChunk = 64;

// Most query rows of a tile: what the registers hold sums for, beside the keys or values and one factor.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// Vectors side by side in a tile of R rows. Few rows alone would leave the multiply-add units waiting for their own
// results.
template <int R>
constexpr int kTileVectors = std::min(kChunk / kLanes, R == 1 ? 8 : R <= kTileRows / 2 ? 4 : 2);

// Memory that will be read soon, from the cache line of p on.
template <class T>
inline void prefetch(const T* p) {
#if defined(__GNUC__)
  __builtin_prefetch(p, 0, 3);
#endif
}
constexpr int64_t kLineBytes = 64;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// ---- keys, turned so that a vector holds one dimension of several tokens ----

// rows[j] is the key of token j, for j up to `count`, rounded up to 8; to[k * kChunk + j] becomes its dimension k. The
// values of the same tokens are wanted next.
template <class T>
void transpose_scalar(const T* const* rows, int count, int64_t from, int64_t head_dim, float* to) {
  for (int64_t k = from; k < head_dim; ++k)
    for (int j = 0; j < count; ++j) to[k * kChunk + j] = widen(rows[j][k]);
}

#if defined(__AVX2__)

// Four values at `low` and four at `high`, as the halves of one vector.
inline __m256 load_halves(const float* low, const float* high) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}
inline __m256 load_halves(const bf16* low, const bf16* high) {
  const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                                          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(both), 16));
}

template <class T>
void transpose(const T* const* rows, const T* const* values, int count, int64_t head_dim, float* to) {
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T));
  const int64_t whole = head_dim / 4 * 4;
  for (int j = 0; j < count; j += 8) {
    const T* const* row = rows + j;
    for (int64_t k = 0; k < whole; k += 4) {
      if (k % kLine == 0)
        for (int i = 0; i < 8; ++i) prefetch(values[j + i] + k);
      const __m256 a = load_halves(row[0] + k, row[4] + k), b = load_halves(row[1] + k, row[5] + k);
      const __m256 c = load_halves(row[2] + k, row[6] + k), d = load_halves(row[3] + k, row[7] + k);
      const __m256 ab_low = _mm256_unpacklo_ps(a, b), ab_high = _mm256_unpackhi_ps(a, b);
      const __m256 cd_low = _mm256_unpacklo_ps(c, d), cd_high = _mm256_unpackhi_ps(c, d);
      float* at = to + k * kChunk + j;
      _mm256_storeu_ps(at, _mm256_shuffle_ps(ab_low, cd_low, 0x44));
      _mm256_storeu_ps(at + kChunk, _mm256_shuffle_ps(ab_low, cd_low, 0xee));
      _mm256_storeu_ps(at + 2 * kChunk, _mm256_shuffle_ps(ab_high, cd_high, 0x44));
      _mm256_storeu_ps(at + 3 * kChunk, _mm256_shuffle_ps(ab_high, cd_high, 0xee));
    }
  }
  transpose_scalar(rows, count, whole, head_dim, to);
}

#else

template <class T>
void transpose(const T* const* rows, const T* const*, int count, int64_t head_dim, float* to) {
  transpose_scalar(rows, count, 0, head_dim, to);
}

#endif

// ---- scores ----

// scores[r][j] = scale * (query row r . token j), for the tokens of V vectors.
template <int R, int V>
inline void score_tile(const float* query, int64_t head_dim, const float* keys, Vec scale, float* scores) {
  Vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = zero();
  for (int64_t k = 0; k < head_dim; ++k) {
    Vec key[V];
    for (int v = 0; v < V; ++v) key[v] = load(keys + k * kChunk + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec a = broadcast(query[r * head_dim + k]);
      for (int v = 0; v < V; ++v) sum[r][v] = fma(a, key[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(scores + r * kChunk + v * kLanes, mul(sum[r][v], scale));
}

// The scores of R rows against the first `count` tokens of a chunk. What comes out behind them means nothing.
template <int R>
void score_rows(const float* query, int64_t head_dim, const float* keys, int count, Vec scale, float* scores) {
  constexpr int V = kTileVectors<R>;
  for (int j = 0; j < count; j += V * kLanes)
    score_tile<R, V>(query, head_dim, keys + j, scale, scores + j);
}

// ---- weighted sums of values ----

// sums[r] = factors[r] * sums[r] + weights[r][j] * value j, for the tokens [begin, end), at the columns of V vectors.
template <int R, int V, class T>
inline void value_tile(const float* weights, const T* const* values, const T* const* next, int64_t column, int begin,
                       int end, const float* factors, float* sums, int64_t width) {
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(T));
  Vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      sum[r][v] = mul(broadcast(factors[r]), load(sums + r * width + column + v * kLanes));
  for (int j = begin; j < end; ++j) {
    if (next)
      for (int64_t i = 0; i < V * kLanes; i += kLine) prefetch(next[j] + column + i);
    Vec value[V];
    for (int v = 0; v < V; ++v) value[v] = load(values[j] + column + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec a = broadcast(weights[r * kChunk + j]);
      for (int v = 0; v < V; ++v) sum[r][v] = fma(a, value[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + r * width + column + v * kLanes, sum[r][v]);
}

// The same over all columns, as many at once as go. `width` is a multiple of kLanes.
template <int R, class T, int V = kTileVectors<R>>
void value_columns(const float* weights, const T* const* values, const T* const* next, int64_t column, int begin,
                   int end, const float* factors, float* sums, int64_t width) {
  for (; column + V * kLanes <= width; column += V * kLanes)
    value_tile<R, V>(weights, values, next, column, begin, end, factors, sums, width);
  if constexpr (V > 1)
    if (column < width) value_columns<R, T, V / 2>(weights, values, next, column, begin, end, factors, sums, width);
}

// R rows of which row r sees the first seen[r] >= 1 tokens of the chunk, seen ascending: what all see is walked
// together, what is left row by row. next[j], where it is not null, is read soon. A token that a row does not see is never multiplied, as it may be NaN.
template <int R, class T>
void value_rows(const float* weights, const T* const* values, const T* const* next, const int* seen,
                const float* factors, float* sums, int64_t width) {
  static const float one = 1.0f;
  const int common = seen[0];
  value_columns<R, T>(weights, values, next, 0, 0, common, factors, sums, width);
  for (int r = 1; r < R; ++r)
    if (seen[r] > common)
      value_columns<1, T>(weights + r * kChunk, values, nullptr, 0, common, seen[r], &one, sums + r * width, width);
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

// Call f<R>(row) for tiles of R rows that together are [begin, end). Dealt out evenly: 7 are 4 and 3, not 6 and 1.
template <class F>
void for_tiles(int begin, int end, const F& f) {
  int row = begin;
  for (int tiles = (end - begin + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const int rows = (end - row) / tiles;
    with_rows<kTileRows>(rows, [&]<int R>() { f.template operator()<R>(row); });
    row += rows;
  }
}

}  // namespace attention
}  // namespace octavo
