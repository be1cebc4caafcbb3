// Tiles of AMX: up to 16 rows of 64 bytes each. Linux lends them to a process that asks.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define OCTAVO_TILES 1

namespace octavo {

// The rows of each of the eight tiles.
using TileRows = std::array<uint8_t, 8>;
constexpr TileRows kWholeTiles = {16, 16, 16, 16, 16, 16, 16, 16};

// The shape of the tiles, for as long as it lives, on the thread that made it.
class TilesInUse {
 public:
  explicit TilesInUse(const TileRows& rows = kWholeTiles) {
    static const bool lent = [] {
      constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
      return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    if (!lent) {
      std::fputs("octavo: the kernel lends no AMX tiles to this process: set OCTAVO_CPU_ISA to a lower set\n", stderr);
      std::abort();
    }
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } shape;
    std::copy(rows.begin(), rows.end(), shape.rows);
    _tile_loadconfig(&shape);
  }
  ~TilesInUse() { _tile_release(); }
  TilesInUse(const TilesInUse&) = delete;
};

}  // namespace octavo
