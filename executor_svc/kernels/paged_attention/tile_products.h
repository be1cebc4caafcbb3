// The products of attention by tiles: scores from queries and keys, sums from weights and values.
//
// A tile adds up each of its elements by itself, in pairs of neighbours along the depth, in the depth's order: so an
// element does not depend on what else is in the tile, on which factor comes from the left, or on lines of zeros.
//
// Keys and values are loaded past the first-level cache: those of a partition would fill it beside scores and weights,
// which come and go in it.
#pragma once

#include <cstdint>

#include "tile_layout.h"

#if defined(OCTAVO_EMULATE_AMX)
#include "../native/csrc/amx_emulated.h"
#elif defined(__AMX_BF16__)
#include "../native/csrc/amx.h"
#endif

#if defined(OCTAVO_TILES)

namespace octavo {
namespace attention {

// Sums of up to four tiles are made side by side, so that none waits for its own result.
constexpr int kTilesAtOnce = 4;

template <int N>
inline void zero_sums() {
  write_for_tiles();
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2) _tile_zero(2);
  if constexpr (N > 3) _tile_zero(3);
}

// The same as store_sums stored.
template <int N>
inline void load_sums(const float* from, int64_t between, int64_t stride) {
  write_for_tiles();
  _tile_loadd(0, from, stride * 4);
  if constexpr (N > 1) _tile_loadd(1, from + between, stride * 4);
  if constexpr (N > 2) _tile_loadd(2, from + 2 * between, stride * 4);
  if constexpr (N > 3) _tile_loadd(3, from + 3 * between, stride * 4);
}

// Sum n at to + n * between, its lines `stride` floats apart.
template <int N>
inline void store_sums(float* to, int64_t between, int64_t stride) {
  _tile_stored(0, to, stride * 4);
  if constexpr (N > 1) _tile_stored(1, to + between, stride * 4);
  if constexpr (N > 2) _tile_stored(2, to + 2 * between, stride * 4);
  if constexpr (N > 3) _tile_stored(3, to + 3 * between, stride * 4);
}

// Keys as they lie, from the left, 16 tokens of N heads: products[head][token][query] with 16 queries of each. Tokens
// are `stride` elements apart, heads `next_head`; queries are tiles of pairs, one for each depth of a head.
template <int N, class F>
inline void multiply_keys(const bf16* keys, int64_t stride, int64_t next_head, const bf16* queries, int64_t depths,
                          float* products, int64_t next_products, const F& between) {
  zero_sums<N>();
  const int64_t next_query = depths * kTileWords * 2;
  for (int64_t k = 0; k < depths; ++k) {
    const bf16* const key = keys + k * kDepth;
    const bf16* const query = queries + k * kTileWords * 2;
    _tile_stream_loadd(4, key, stride * 2);
    _tile_loadd(6, query, 64);
    _tile_dpbf16ps(0, 4, 6);
    between();
    if constexpr (N > 1) {
      _tile_stream_loadd(5, key + next_head, stride * 2);
      _tile_loadd(7, query + next_query, 64);
      _tile_dpbf16ps(1, 5, 7);
      between();
    }
    if constexpr (N > 2) {
      _tile_stream_loadd(4, key + 2 * next_head, stride * 2);
      _tile_loadd(6, query + 2 * next_query, 64);
      _tile_dpbf16ps(2, 4, 6);
      between();
    }
    if constexpr (N > 3) {
      _tile_stream_loadd(5, key + 3 * next_head, stride * 2);
      _tile_loadd(7, query + 3 * next_query, 64);
      _tile_dpbf16ps(3, 5, 7);
      between();
    }
  }
  store_sums<N>(products, next_products, kTile);
}

// From the left 16 queries, `width` elements each; from the right N times 16 keys in tiles of pairs, `width` / kDepth
// of each group. scores[query][n * 16 + token], queries `stride` apart.
template <int N>
inline void multiply_queries(const bf16* queries, int64_t width, const bf16* keys, float* scores, int64_t stride) {
  zero_sums<N>();
  const int64_t between = width * kTile;
  for (int64_t k = 0; k < width / kDepth; ++k) {
    const bf16* const tiles = keys + k * kTileWords * 2;
    _tile_loadd(4, queries + k * kDepth, width * 2);
    _tile_stream_loadd(6, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      _tile_stream_loadd(7, tiles + between, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (N > 2) {
      _tile_stream_loadd(6, tiles + 2 * between, 64);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (N > 3) {
      _tile_stream_loadd(7, tiles + 3 * between, 64);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  store_sums<N>(scores, kTile, stride);
}

// 16 tokens' values of a head, one `stride` elements behind the other.
struct ValueTile {
  const bf16* at;
  int64_t stride;
};

// Tiles of weights from the left, values as they lie from the right: for the tokens of the tiles [begin, end) sums of
// the kDepth elements from `column` on and of the N - 1 times as many behind them. A line of sums holds 16 even or odd
// elements, see store_weights; lines are `stride` floats apart. `more`: behind what the sums hold already.
template <int N, class F>
inline void multiply_weights(const float* weights, const ValueTile* values, int64_t begin, int64_t end, int64_t column,
                             bool more, float* sums, int64_t stride, const F& between) {
  if (more)
    load_sums<N>(sums + column / 2, kTile, stride);
  else
    zero_sums<N>();
  for (int64_t t = begin; t < end; ++t) {
    const bf16* const at = values[t].at + column;
    const int64_t bytes = values[t].stride * 2;
    _tile_loadd(4, weights + t * kTileWords, 64);
    _tile_stream_loadd(6, at, bytes);
    _tile_dpbf16ps(0, 4, 6);
    between();
    if constexpr (N > 1) {
      _tile_stream_loadd(7, at + kDepth, bytes);
      _tile_dpbf16ps(1, 4, 7);
      between();
    }
    if constexpr (N > 2) {
      _tile_stream_loadd(6, at + 2 * kDepth, bytes);
      _tile_dpbf16ps(2, 4, 6);
      between();
    }
    if constexpr (N > 3) {
      _tile_stream_loadd(7, at + 3 * kDepth, bytes);
      _tile_dpbf16ps(3, 4, 7);
      between();
    }
  }
  store_sums<N>(sums + column / 2, kTile, stride);
}

// The same for two tiles of weights, `next` apart, whose sums are 16 lines apart, and for N <= 2.
template <int N>
inline void multiply_two_weights(const float* weights, int64_t next, const ValueTile* values, int64_t begin,
                                 int64_t end, int64_t column, bool more, float* sums, int64_t stride) {
  float* const to = sums + column / 2;
  zero_sums<4>();
  if (more) {
    _tile_loadd(0, to, stride * 4);
    _tile_loadd(2, to + kTile * stride, stride * 4);
    if constexpr (N > 1) {
      _tile_loadd(1, to + kTile, stride * 4);
      _tile_loadd(3, to + kTile * stride + kTile, stride * 4);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    const bf16* const at = values[t].at + column;
    const int64_t bytes = values[t].stride * 2;
    _tile_loadd(4, weights + t * kTileWords, 64);
    _tile_stream_loadd(6, at, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weights + next + t * kTileWords, 64);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (N > 1) {
      _tile_stream_loadd(7, at + kDepth, bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to, stride * 4);
  _tile_stored(2, to + kTile * stride, stride * 4);
  if constexpr (N > 1) {
    _tile_stored(1, to + kTile, stride * 4);
    _tile_stored(3, to + kTile * stride + kTile, stride * 4);
  }
}

// Call f<N>(first) for groups of N <= kTilesAtOnce that together are [begin, end).
template <class F>
inline void for_groups(int64_t begin, int64_t end, const F& f) {
  for (; begin + kTilesAtOnce <= end; begin += kTilesAtOnce) f.template operator()<kTilesAtOnce>(begin);
  switch (end - begin) {
    case 3: return f.template operator()<3>(begin);
    case 2: return f.template operator()<2>(begin);
    case 1: return f.template operator()<1>(begin);
    default: return;
  }
}

}  // namespace attention
}  // namespace octavo

#endif
