// Products by AMX: 16 rows of 32 inputs times 16 columns at a time, in steps of kDepth inputs.
//
// Every output is one running sum over the steps, in order, whatever the number of rows, or of columns side by side.
//
// Up to 64 rows or so wait for the weights, and those come fastest where a core reads several panels at once, each fetched
// half a KiB ahead: farther ahead, or by the processor alone, it was a fifth to a third slower. Activations of more rows
// than a tile has are copied to where the steps of a pair of tiles follow each other: they come from the second-level
// cache for every panel, and rows a power of two apart would drive each other from it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "bf16.h"

#if defined(OCTAVO_EMULATE_AMX)
#include "../native/csrc/amx_emulated.h"
#else
#include "../native/csrc/amx.h"
#endif

namespace octavo {
namespace {

static_assert(kPanel == 16, "a panel is as wide as a tile");
constexpr int64_t kTileRows = 16;
constexpr int64_t kTile = kTileRows * kDepth;  // activations of a tile
constexpr int64_t kPairRows = 2 * kTileRows;
// Words (two inputs of a column) of a panel in a step, and the same in bytes.
constexpr int64_t kStepWords = kDepth / 2 * kPanel;
constexpr int64_t kStepBytes = kStepWords * 4;
// Sums of a tile, and panels that few rows read at once: as many as leave tiles for the inputs.
constexpr int64_t kSums = kTileRows * kPanel;
constexpr int kStreams = 6;
// How far ahead of the products a panel is fetched.
constexpr int64_t kAhead = 512;
// Lines a step of each panel that comes next: about what memory gives meanwhile.
constexpr int64_t kLines = 2;
// Bytes of activations that a pass over the weights works on: they stay in the core's own cache, beside some panels.
constexpr int64_t kRowsBytes = 1 << 20;

inline void fetch_ahead(const uint32_t* w) {
  for (int64_t line = 0; line < kStepBytes; line += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + line, 0, 3);
}

// The activations of a tile in each step: rows `stride` apart, steps `step`, in elements.
struct Tiles {
  const bf16* x;
  int64_t stride;
  int64_t step;
};

// The panels that a call reads for some columns of its result: P of them, or P / 2 gates and then what they are for.
template <int P>
struct Panels {
  const uint32_t* at[P];

  Panels(const Call& call, int64_t first) {
    const int64_t results = call.is_gated() ? P / 2 : P, half = num_panels(*call.weight) / 2;
    for (int64_t p = 0; p < P; ++p) at[p] = panel_of(*call.weight, first + p % results + p / results * half);
  }
};

// The tile that a number names must be known when this is compiled.
#define OCTAVO_ADD_PANEL(number)                                  \
  if constexpr (P > number) {                                     \
    const uint32_t* const w = panels.at[number] + k * kStepWords; \
    fetch_ahead(w);                                               \
    _tile_loadd(7, w, kPanel * 4);                                \
    _tile_dpbf16ps(number, 6, 7);                                 \
  }
#define OCTAVO_EACH_PANEL(action) action(0) action(1) action(2) action(3) action(4) action(5)
#define OCTAVO_CLEAR_PANEL(number) \
  if constexpr (P > number) _tile_zero(number);
#define OCTAVO_STORE_PANEL(number) \
  if constexpr (P > number) _tile_stored(number, sums + number * kSums, kPanel * 4);

// Up to 16 rows times P panels. `sums` is [P][16][kPanel].
template <int P>
void multiply_few(Tiles a, const Panels<P>& panels, int64_t steps, float* sums) {
  write_for_tiles();
  OCTAVO_EACH_PANEL(OCTAVO_CLEAR_PANEL)
  for (int64_t k = 0; k < steps; ++k, a.x += a.step) {
    _tile_loadd(6, a.x, a.stride * 2);
    OCTAVO_EACH_PANEL(OCTAVO_ADD_PANEL)
  }
  OCTAVO_EACH_PANEL(OCTAVO_STORE_PANEL)
}

template <class Activation>
void gate_panel(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* gate, const float* up) {
  const Weight& weight = *call.weight;
  const float* const bias = weight.bias ? weight.bias + call.width() + panel * kPanel : nullptr;
  write_panel<bf16>(call, row, rows, panel, gate, [&](Vec x, int64_t at) {
    const Vec other = bias ? add(load(up + at), load(bias + at % kPanel)) : load(up + at);
    return mul(Activation::of(rounded_to_bf16(x)), rounded_to_bf16(other));
  });
}

// The columns of a panel of the result, of some rows.
void finish_gated(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* gate, const float* up) {
  switch (call.epilogue) {
    case kGeluErfAndMul: return gate_panel<GeluErf>(call, row, rows, panel, gate, up);
    case kGeluTanhAndMul: return gate_panel<GeluTanh>(call, row, rows, panel, gate, up);
    default: return gate_panel<Silu>(call, row, rows, panel, gate, up);
  }
}

// The columns of two panels side by side, of some rows: a line of memory is written in one go.
void finish_two(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* left, const float* right) {
  const int64_t column = panel * kPanel;
  if (call.weight->bias || call.epilogue != kToBfloat16 || column + 2 * kPanel > call.width()) {
    finish(call, row, rows, panel, left);
    finish(call, row, rows, panel + 1, right);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    bf16* const to = static_cast<bf16*>(call.out) + (row + r) * call.width() + column;
    for (int i = 0; i < kPanel; i += kLanes) store(to + i, load(left + r * kPanel + i));
    for (int i = 0; i < kPanel; i += kLanes) store(to + kPanel + i, load(right + r * kPanel + i));
  }
}

// Panels [begin, end) of the result for up to 16 rows, from P panels of the weight at once.
template <int P>
void few_rows(const Call& call, const Tiles& a, int64_t begin, int64_t end) {
  if constexpr (P > 0) {
    const int64_t steps = padded(call.weight->in_features) / kDepth;
    alignas(64) float sums[P * kSums];
    if (!call.is_gated()) {
      for (; begin + P <= end; begin += P) {
        multiply_few<P>(a, Panels<P>(call, begin), steps, sums);
        for (int p = 0; p < P; ++p) finish(call, 0, call.rows, begin + p, sums + p * kSums);
      }
    } else if constexpr (P % 2 == 0) {
      for (; begin + P / 2 <= end; begin += P / 2) {
        multiply_few<P>(a, Panels<P>(call, begin), steps, sums);
        for (int p = 0; p < P / 2; ++p)
          finish_gated(call, 0, call.rows, begin + p, sums + p * kSums, sums + (P / 2 + p) * kSums);
      }
    }
    if (begin < end) few_rows<P - 1>(call, a, begin, end);
  }
}

// 32 rows times one or two panels: each tile of weights meets two of activations, and the other way round. `x` is
// [steps][2][16][kDepth], `sums` [2][P][16][kPanel]. The weights are fetched from memory on the way if this is their
// `first` use, and else `next` ones, from line `line` on.
template <int P, bool first>
void multiply_pair(const bf16* x, const Panels<P>& panels, int64_t steps, const Panels<P>& next, int64_t line,
                   float* sums) {
  write_for_tiles();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (P > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; ++k, x += 2 * kTile) {
    for (int p = 0; p < P; ++p) {
      if constexpr (first)
        fetch_ahead(panels.at[p] + k * kStepWords);
      else
        for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(next.at[p] + (line + k * kLines + i) * 16, 0, 2);
    }
    _tile_loadd(4, x, kDepth * 2);
    _tile_loadd(6, panels.at[0] + k * kStepWords, kPanel * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x + kTile, kDepth * 2);
    if constexpr (P > 1) {
      _tile_loadd(7, panels.at[1] + k * kStepWords, kPanel * 4);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    } else {
      _tile_dpbf16ps(1, 5, 6);
    }
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kSums, kPanel * 4);
  if constexpr (P > 1) {
    _tile_stored(2, sums + 2 * kSums, kPanel * 4);
    _tile_stored(3, sums + 3 * kSums, kPanel * 4);
  }
}

// Write what a pair of tiles and P panels gave.
template <int P>
void finish_pair(const Call& call, int64_t pair, int64_t panel, const float* sums) {
  for (int64_t row = pair * kPairRows; row < std::min(call.rows, (pair + 1) * kPairRows); row += kTileRows) {
    const int64_t rows = std::min(kTileRows, call.rows - row);
    if constexpr (P == 1)
      finish(call, row, rows, panel, sums);
    else if (call.is_gated())
      finish_gated(call, row, rows, panel, sums, sums + kSums);
    else
      finish_two(call, row, rows, panel, sums, sums + kSums);
    sums += P * kSums;
  }
}

// What P panels of the weight give from `panel` of the result on, for the pairs [from, until) of tiles of rows.
template <int P>
void many_rows(const Call& call, const bf16* tiles, int64_t from, int64_t until, int64_t panel) {
  const int64_t steps = padded(call.weight->in_features) / kDepth;
  // What is fetched behind the last panel of all is of no use, and does no harm.
  const Panels<P> panels(call, panel), next(call, panel + (call.is_gated() ? P / 2 : P));
  // A pair's sums are written out while the next one's products are under way.
  alignas(64) float sums[2][2 * P * kSums];
  for (int64_t pair = from; pair < until; ++pair) {
    const bf16* const x = tiles + pair * steps * 2 * kTile;
    if (pair == from) {
      multiply_pair<P, true>(x, panels, steps, next, 0, sums[pair % 2]);
    } else {
      multiply_pair<P, false>(x, panels, steps, next, (pair - from - 1) * steps * kLines, sums[pair % 2]);
      finish_pair<P>(call, pair - 1, panel, sums[(pair - 1) % 2]);
    }
  }
  finish_pair<P>(call, until - 1, panel, sums[(until - 1) % 2]);
}

// Panels [begin, end) of the result for rows that lie in pairs of tiles.
void many_rows(const Call& call, const bf16* tiles, int64_t begin, int64_t end) {
  const int64_t pair_bytes = padded(call.weight->in_features) * kPairRows * 2;
  const int64_t pairs = (call.rows + kPairRows - 1) / kPairRows;
  const int64_t section = std::max<int64_t>(1, kRowsBytes / pair_bytes), two = call.is_gated() ? 1 : 2;
  for (int64_t from = 0; from < pairs; from += section) {
    const int64_t until = std::min(pairs, from + section);
    int64_t panel = begin;
    for (; panel + two <= end; panel += two) many_rows<2>(call, tiles, from, until, panel);
    if (panel < end) many_rows<1>(call, tiles, from, until, panel);
  }
}

// The tiles [begin, end) of rows of x to where they lie, zeros where x has nothing; a step has `side_by_side` of them.
void fill_tiles(const Call& call, bf16* tiles, int64_t side_by_side, int64_t begin, int64_t end) {
  const int64_t in_features = call.weight->in_features, steps = padded(in_features) / kDepth;
  for (int64_t tile = begin; tile < end; ++tile) {
    bf16* to = tiles + (tile / side_by_side * steps * side_by_side + tile % side_by_side) * kTile;
    const int64_t rows = std::clamp<int64_t>(call.rows - tile * kTileRows, 0, kTileRows);
    for (int64_t k = 0; k < steps; ++k, to += side_by_side * kTile) {
      const int64_t width = std::min(kDepth, in_features - k * kDepth);
      const bf16* from = call.x + tile * kTileRows * in_features + k * kDepth;
      if (rows < kTileRows || width < kDepth) std::fill_n(to, kTile, bf16{0});
      for (int64_t row = 0; row < rows; ++row, from += in_features) {
        if (width == kDepth)
          std::memcpy(to + row * kDepth, from, kDepth * sizeof(bf16));
        else
          std::copy_n(from, width, to + row * kDepth);
      }
    }
  }
}

// The memory is kept: a step takes none.
bf16* tiles_for(int64_t elements) {
  constexpr int64_t kLine = 64 / sizeof(bf16);
  static thread_local std::vector<bf16> memory;
  if (static_cast<int64_t>(memory.size()) < elements + kLine) memory.resize(static_cast<size_t>(elements + kLine));
  return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) % 64) / sizeof(bf16);
}

// A gate's columns and those it is for begin with a panel each.
bool takes_gate(int64_t out_features) { return out_features % (2 * kPanel) == 0; }

void multiply(const Call& call) {
  const Weight& weight = *call.weight;
  const int64_t stride = padded(weight.in_features), panels = num_panels(weight) / (call.is_gated() ? 2 : 1);
  Shares shares;
  shares.start(panels, std::max<int64_t>(1, panels / (team_size() * 8 * kStreams)) * kStreams);
  if (call.rows <= kTileRows) {
    Tiles a{call.x, stride, kDepth};
    if (stride != weight.in_features) {
      bf16* const tiles = tiles_for(kTileRows * stride);
      fill_tiles(call, tiles, 1, 0, 1);
      a = Tiles{tiles, kDepth, kTile};
    }
    const uint8_t rows = static_cast<uint8_t>(call.rows);
    on_team([&] {
      const TilesInUse in_use(TileRows{rows, rows, rows, rows, rows, rows, rows, 16});
      const Part part(call);
      int64_t begin, end;
      while (shares.take(&begin, &end)) few_rows<kStreams>(call, a, begin, end);
    });
    return;
  }
  on_team([&] {
    int64_t begin, end;
    if (!shares.take(&begin, &end)) return;
    // Each thread has its own copy: lines that another core wrote last come slower than the copying takes.
    const int64_t count = (call.rows + kPairRows - 1) / kPairRows * 2;
    bf16* const tiles = tiles_for(count * kTileRows * stride);
    fill_tiles(call, tiles, 2, 0, count);
    const TilesInUse in_use;
    const Part part(call);
    do {
      many_rows(call, tiles, begin, end);
    } while (shares.take(&begin, &end));
  });
}

}  // namespace
}  // namespace octavo
