// AMX in plain C++, for tests of the code around it on processors without. Intel's reference (Instruction Set Extensions
// Programming Reference, TDPBF16PS) sums the even and the odd products apart in a step and adds both to the tile.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "simd.h"

#define OCTAVO_TILES 1

namespace octavo {

inline void write_for_tiles() {}

using TileRows = std::array<uint8_t, 8>;
constexpr TileRows kWholeTiles = {16, 16, 16, 16, 16, 16, 16, 16};

inline thread_local unsigned char tile_bytes[8][16][64];
inline thread_local TileRows tile_rows;

struct TilesInUse {
  // Whoever reads a tile that nobody wrote gets NaN.
  explicit TilesInUse(const TileRows& rows = kWholeTiles) {
    tile_rows = rows;
    std::memset(tile_bytes, 0xff, sizeof tile_bytes);
  }
  ~TilesInUse() {}
};

inline void emulated_tile_zero(int tile) { std::memset(tile_bytes[tile], 0, sizeof tile_bytes[tile]); }

inline void emulated_tile_loadd(int tile, const void* base, int64_t stride) {
  for (int row = 0; row < tile_rows[tile]; ++row)
    std::memcpy(tile_bytes[tile][row], static_cast<const char*>(base) + row * stride, 64);
}

inline void emulated_tile_stored(int tile, void* base, int64_t stride) {
  for (int row = 0; row < tile_rows[tile]; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, tile_bytes[tile][row], 64);
}

inline void emulated_tile_dpbf16ps(int sums, int a, int b) {
  for (int row = 0; row < tile_rows[sums]; ++row) {
    float sum[16];
    std::memcpy(sum, tile_bytes[sums][row], sizeof sum);
    for (int column = 0; column < 16; ++column) {
      float even = 0, odd = 0;
      for (int pair = 0; pair < 16; ++pair) {
        bf16 x[2], w[2];
        std::memcpy(x, tile_bytes[a][row] + pair * 4, sizeof x);
        std::memcpy(w, tile_bytes[b][pair] + column * 4, sizeof w);
        even += widen(x[0]) * widen(w[0]);
        odd += widen(x[1]) * widen(w[1]);
      }
      sum[column] += even + odd;
    }
    std::memcpy(tile_bytes[sums][row], sum, sizeof sum);
  }
}

}  // namespace octavo

// Macros in g++'s header, functions in clang's.
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_loadd
#define _tile_stream_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_dpbf16ps emulated_tile_dpbf16ps
