// Linear layers over weights that are packed once, float32 arithmetic.
//
// The floor of a step is to read every weight once; at 2 bytes each where the checkpoint has bfloat16 weights, which is
// exact, since a bfloat16 is a float32 whose lower half is zero. They are widened on the way into the multiplication, two
// columns from one 32-bit word: a shift for one, a mask for the other, on ports that the multiply-adds leave idle.
//
// Each output is one running sum over in_features, in order, whatever the number of rows: a row's result does not depend
// on the rows beside it, bit for bit.
#include <algorithm>
#include <cstddef>

#include "../native/csrc/program.h"
#include "../native/csrc/shares.h"
#include "../native/csrc/simd.h"

namespace octavo {
namespace {

// Columns of a panel: two vectors.
constexpr int kPanel = 2 * kLanes;

// Most rows of a tile: what the registers hold sums for, beside the weights and one activation.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif

// Bytes of activations that a pass over the weights works on: they should stay in a private cache.
constexpr int64_t kRowsBytes = 256 * 1024;

enum Storage : int32_t { kFloat32 = 0, kBfloat16 = 1 };

struct Weight {
  const void* panels;  // [out / kPanel, rounded up][in][kPanel]; bfloat16 columns j and j + kLanes share a word
  const float* bias;   // [out], or null
  int64_t out_features;
  int64_t in_features;
  int32_t storage;
};

// Where column j of a panel lies among its bfloat16: the lower halves of the words hold the first kLanes columns.
int64_t bfloat16_place(int64_t j) { return 2 * (j % kLanes) + j / kLanes; }

struct Float32Columns {
  static constexpr int kBytes = kPanel * 4;
  static void load(const char* p, Vec* first, Vec* second) {
    *first = octavo::load(reinterpret_cast<const float*>(p));
    *second = octavo::load(reinterpret_cast<const float*>(p) + kLanes);
  }
};

struct Bfloat16Columns {
  static constexpr int kBytes = kPanel * 2;
  static void load(const char* p, Vec* first, Vec* second) {
    const Bits both = load_bits(p);
    *first = low_halves(both);
    *second = high_halves(both);
  }
};

// R rows times P panels: out[r][column] for all in_features.
template <class Columns, int R, int P>
void multiply_tile(const float* x, int64_t in_features, const char* panels, float* sums) {
  const int64_t panel_bytes = in_features * Columns::kBytes;
  Vec sum[R][2 * P];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v) sum[r][v] = zero();
  for (int64_t k = 0; k < in_features; ++k) {
#if defined(__GNUC__)
    // The stream of weights is longer than the processor's own prefetcher looks, at the start of each panel most of all.
    for (int p = 0; p < P; ++p) __builtin_prefetch(panels + p * panel_bytes + k * Columns::kBytes + 1024, 0, 3);
#endif
    Vec w[2 * P];
    for (int p = 0; p < P; ++p) Columns::load(panels + p * panel_bytes + k * Columns::kBytes, &w[2 * p], &w[2 * p + 1]);
    for (int r = 0; r < R; ++r) {
      const Vec a = broadcast(x[r * in_features + k]);
      for (int v = 0; v < 2 * P; ++v) sum[r][v] = fma(a, w[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v) store(sums + r * (kPanel * P) + v * kLanes, sum[r][v]);
}

struct Call {
  const Weight* weight;
  const float* x;
  float* out;
  int64_t rows;
};

template <class Columns, int R, int P>
void tile(const Call& call, int64_t row, int64_t panel) {
  const Weight& weight = *call.weight;
  alignas(64) float sums[R * P * kPanel];
  const char* panels = static_cast<const char*>(weight.panels) + panel * weight.in_features * Columns::kBytes;
  multiply_tile<Columns, R, P>(call.x + row * weight.in_features, weight.in_features, panels, sums);
  const int64_t column = panel * kPanel;
  const int64_t width = std::min<int64_t>(P * kPanel, weight.out_features - column);
  for (int r = 0; r < R; ++r) {
    float* out = call.out + (row + r) * weight.out_features + column;
    const float* sum = sums + r * P * kPanel;
    if (weight.bias)
      for (int64_t i = 0; i < width; ++i) out[i] = sum[i] + weight.bias[column + i];
    else
      for (int64_t i = 0; i < width; ++i) out[i] = sum[i];
  }
}

// All rows of [row, row + R) over panels [begin, end), as many panels at once as the registers hold: few rows alone would
// leave the multiply-add units waiting for their own results.
template <class Columns, int R>
void rows_over_panels(const Call& call, int64_t row, int64_t begin, int64_t end) {
  constexpr int P = std::max(1, std::min(4, kTileRows / (2 * R) + (R == 1 ? 1 : 0)));
  int64_t panel = begin;
  for (; panel + P <= end; panel += P) tile<Columns, R, P>(call, row, panel);
  for (; panel < end; ++panel) tile<Columns, R, 1>(call, row, panel);
}

template <class Columns, int R = kTileRows>
void dispatch_rows(int64_t rows, const Call& call, int64_t row, int64_t begin, int64_t end) {
  if constexpr (R > 0) {
    if (rows == R)
      rows_over_panels<Columns, R>(call, row, begin, end);
    else
      dispatch_rows<Columns, R - 1>(rows, call, row, begin, end);
  }
}

// One panel (or a few) at a time over all rows of a block, so that its weights are read from memory once.
template <class Columns>
void multiply_share(const Call& call, int64_t begin, int64_t end) {
  const int64_t in_features = call.weight->in_features;
  const int64_t block = std::max<int64_t>(1, kRowsBytes / (in_features * 4 * kTileRows)) * kTileRows;
  for (int64_t first = 0; first < call.rows; first += block) {
    const int64_t count = std::min(block, call.rows - first);
    const int64_t tiles = (count + kTileRows - 1) / kTileRows;
    const int64_t step = tiles == 1 ? end - begin : 1;
    for (int64_t panel = begin; panel < end; panel += step) {
      // Rows are dealt out evenly: 7 are 4 and 3, not 6 and 1.
      int64_t row = first;
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t rows = (first + count - row) / (tiles - t);
        dispatch_rows<Columns>(rows, call, row, panel, panel + step);
        row += rows;
      }
    }
  }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

OCTAVO_EXPORT int64_t octavo_linear_panel() { return kPanel; }

// x is [rows, in], out [rows, out], both contiguous. The last argument is that of octavo_linear_bf16, which has a choice.
OCTAVO_EXPORT void octavo_linear(const Weight* weight, const float* x, float* out, int64_t rows, int32_t) {
  const int64_t panels = (weight->out_features + kPanel - 1) / kPanel;
  const Call call{weight, x, out, rows};
  Shares shares;
  // Pieces small enough that a thread which another process holds up leaves its work to the others.
  shares.start_in_order(panels, std::max<int64_t>(4, (panels / (team_size() * 8)) / 4 * 4));
  on_team([&] {
    int64_t begin, end;
    while (shares.take(&begin, &end)) {
      if (weight->storage == kBfloat16)
        multiply_share<Bfloat16Columns>(call, begin, end);
      else
        multiply_share<Float32Columns>(call, begin, end);
    }
  });
}

// Rows of the weight, [count, in].
OCTAVO_EXPORT void octavo_linear_weight_rows(const Weight* weight, const int64_t* rows, float* out, int64_t count) {
  const int64_t in_features = weight->in_features;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t panel = rows[i] / kPanel, j = rows[i] % kPanel;
    const int64_t first = panel * in_features * kPanel + (weight->storage == kBfloat16 ? bfloat16_place(j) : j);
    for (int64_t k = 0; k < in_features; ++k) {
      const int64_t at = first + k * kPanel;
      out[i * in_features + k] = weight->storage == kBfloat16 ? widen(static_cast<const bf16*>(weight->panels)[at])
                                                              : static_cast<const float*>(weight->panels)[at];
    }
  }
}

// Whether every one of n values is a bfloat16: then those hold them exactly, in half the memory.
OCTAVO_EXPORT int32_t octavo_fits_bfloat16(const float* values, int64_t n) {
  uint32_t low = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], sizeof bits);
    low |= bits & 0xffffu;
    // A look now and then: most weights that do not fit show it at once.
    if (i % 4096 == 4095 && low) return 0;
  }
  return low == 0;
}

// weight is [out, in]; panels has room for octavo_linear_panel() times as many rows, rounded up, of in_features.
OCTAVO_EXPORT void octavo_pack_linear(const float* weight, int64_t out_features, int64_t in_features, int32_t storage,
                                   void* panels) {
  const int64_t count = (out_features + kPanel - 1) / kPanel;
  for (int64_t panel = 0; panel < count; ++panel) {
    for (int64_t k = 0; k < in_features; ++k) {
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t row = panel * kPanel + j;
        const float value = row < out_features ? weight[row * in_features + k] : 0.0f;
        const int64_t at = (panel * in_features + k) * kPanel;
        if (storage == kBfloat16)
          static_cast<bf16*>(panels)[at + bfloat16_place(j)] = to_bf16(value);
        else
          static_cast<float*>(panels)[at + j] = value;
      }
    }
  }
}

OCTAVO_IN_PROGRAMS(octavo_linear)
OCTAVO_IN_PROGRAMS(octavo_linear_weight_rows)
