// Products by AMX: 16 rows of 32 inputs times 16 columns at a time, in steps of kDepth inputs.
//
// Every output is one running sum over the steps, in order, whatever the number of rows, or of columns side by side.
//
// The rows of one tile wait for the weights, and those come fastest where a core reads several panels at once, each
// fetched half a KiB ahead: farther ahead, or by the processor alone, it was a fifth to a third slower. See tile_pairs.h
// for more rows.
#pragma once

#include <algorithm>

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
// Words (two inputs of a column) of a panel in a step, and the same in bytes.
constexpr int64_t kStepWords = kDepth / 2 * kPanel;
constexpr int64_t kStepBytes = kStepWords * 4;
// Sums of a tile, and panels that few rows read at once: as many as leave tiles for the inputs.
constexpr int64_t kSums = kTileRows * kPanel;
constexpr int kStreams = 6;
// How far ahead of the products a panel is fetched.
constexpr int64_t kAhead = 512;

inline void fetch_ahead(const uint32_t* w) {
  for (int64_t line = 0; line < kStepBytes; line += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead + line, 0, 3);
}

// The panels that a call reads for some columns of its result: P of them, or P / 2 gates and then what they are for.
template <int P>
struct Panels {
  const uint32_t* at[P];

  // From the step `begin` of each on.
  Panels(const Call& call, int64_t first, int64_t begin = 0) {
    const int64_t results = call.is_gated() ? P / 2 : P, half = num_panels(*call.weight) / 2;
    for (int64_t p = 0; p < P; ++p)
      at[p] = panel_of(*call.weight, first + p % results + p / results * half) + begin * kStepWords;
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
void multiply_few(const bf16* x, int64_t stride, const Panels<P>& panels, int64_t steps, float* sums) {
  write_for_tiles();
  OCTAVO_EACH_PANEL(OCTAVO_CLEAR_PANEL)
  for (int64_t k = 0; k < steps; ++k) {
    _tile_loadd(6, x + k * kDepth, stride * 2);
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

// Panels [begin, end) of the result for up to 16 rows, from P panels of the weight at once.
template <int P>
void few_rows(const Call& call, const bf16* x, int64_t stride, int64_t begin, int64_t end) {
  if constexpr (P > 0) {
    const int64_t steps = padded(call.weight->in_features) / kDepth;
    alignas(64) float sums[P * kSums];
    if (!call.is_gated()) {
      for (; begin + P <= end; begin += P) {
        multiply_few<P>(x, stride, Panels<P>(call, begin), steps, sums);
        for (int p = 0; p < P; ++p) finish(call, 0, call.rows, begin + p, sums + p * kSums);
      }
    } else if constexpr (P % 2 == 0) {
      for (; begin + P / 2 <= end; begin += P / 2) {
        multiply_few<P>(x, stride, Panels<P>(call, begin), steps, sums);
        for (int p = 0; p < P / 2; ++p)
          finish_gated(call, 0, call.rows, begin + p, sums + p * kSums, sums + (P / 2 + p) * kSums);
      }
    }
    if (begin < end) few_rows<P - 1>(call, x, stride, begin, end);
  }
}

}  // namespace
}  // namespace octavo
