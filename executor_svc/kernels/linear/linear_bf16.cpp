// Linear layers of bfloat16 activations and weights, summed in float32.
//
// Weights lie in pairs: a 32-bit word holds one column's weights for two neighbouring inputs, and the activations come in
// the same pairs, so that one instruction multiplies both and adds both where the processor has it (AVX512-BF16). AMX
// multiplies 16 rows of 32 inputs by 16 columns at a time, from the very same layout. Elsewhere a word is split by a shift
// and a mask, and the arithmetic is float32's.
//
// An output is one running sum over the pairs, in order, whatever the number of rows.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "../native/csrc/program.h"
#include "../native/csrc/simd.h"
#include "../native/csrc/team.h"

#if defined(OCTAVO_EMULATE_AMX)
#include "../native/csrc/amx_emulated.h"
#elif defined(__AMX_BF16__)
#include "../native/csrc/amx.h"
#endif

namespace octavo {
namespace {

// Inputs that a weight is padded to with zeros: the depth of a tile.
constexpr int64_t kDepth = 32;
// Columns of a panel. Two vectors of AVX-512, two tiles of AMX.
constexpr int kPanel = 32;
constexpr int kVectors = kPanel / kLanes;

struct Weight {
  const uint32_t* panels;  // [out / kPanel, rounded up][in / 2, padded][kPanel]
  const float* bias;       // [out], or null
  int64_t out_features;
  int64_t in_features;
};

int64_t padded(int64_t in_features) { return (in_features + kDepth - 1) / kDepth * kDepth; }

struct Call {
  const Weight* weight;
  const bf16* x;  // [rows, padded(in)], zeros behind in
  bf16* out;
  int64_t rows;
};

const uint32_t* panel_of(const Weight& weight, int64_t panel) {
  return weight.panels + panel * (padded(weight.in_features) / 2) * kPanel;
}

// sums is [rows, kPanel].
void finish(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  const Weight& weight = *call.weight;
  const int64_t column = panel * kPanel;
  const int64_t width = std::min<int64_t>(kPanel, weight.out_features - column);
  for (int64_t r = 0; r < rows; ++r) {
    bf16* out = call.out + (row + r) * weight.out_features + column;
    for (int64_t i = 0; i < width; ++i)
      out[i] = to_bf16(sums[r * kPanel + i] + (weight.bias ? weight.bias[column + i] : 0.0f));
  }
}

#if defined(OCTAVO_TILES)

constexpr int64_t kRowsAtOnce = 32;
// Bytes that are fetched ahead of the multiplication, per step of kDepth inputs.
constexpr int64_t kStepBytes = kDepth / 2 * kPanel * 4;
constexpr int64_t kAhead = 8 * kStepBytes;

// Two by two tiles: each tile of weights meets 32 rows, each tile of activations 32 columns.
void multiply_32(const bf16* x, int64_t stride, const uint32_t* w, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    const uint32_t* tiles = w + step * (kDepth / 2) * kPanel;
    for (int64_t line = 0; line < kStepBytes; line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(tiles) + kAhead + line, 0, 3);
    _tile_loadd(4, x + step * kDepth, stride * 2);
    _tile_loadd(6, tiles, kPanel * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tiles + 16, kPanel * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + 16 * stride + step * kDepth, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + 16, kPanel * 4);
  _tile_stored(2, sums + 16 * kPanel, kPanel * 4);
  _tile_stored(3, sums + 16 * kPanel + 16, kPanel * 4);
}

void multiply_16(const bf16* x, int64_t stride, const uint32_t* w, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < steps; ++step) {
    const uint32_t* tiles = w + step * (kDepth / 2) * kPanel;
    for (int64_t line = 0; line < kStepBytes; line += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(tiles) + kAhead + line, 0, 3);
    _tile_loadd(4, x + step * kDepth, stride * 2);
    _tile_loadd(6, tiles, kPanel * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tiles + 16, kPanel * 4);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + 16, kPanel * 4);
}

void multiply_share(const Call& call, int64_t begin, int64_t end) {
  const int64_t stride = padded(call.weight->in_features), steps = stride / kDepth;
  alignas(64) float sums[kRowsAtOnce * kPanel];
  const TilesInUse tiles;
  for (int64_t panel = begin; panel < end; ++panel) {
    const uint32_t* w = panel_of(*call.weight, panel);
    for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
      const int64_t rows = std::min(kRowsAtOnce, call.rows - row);
      // Rows behind the last are zeros of the scratch that x was copied to.
      (rows > 16 ? multiply_32 : multiply_16)(call.x + row * stride, stride, w, steps, sums);
      finish(call, row, rows, panel, sums);
    }
  }
}

constexpr int64_t kRowsMultiple = kRowsAtOnce;

#else

constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;
constexpr int64_t kRowsMultiple = 1;

// sum + a's low half times w's + a's high half times w's.
Vec add_products(Vec sum, Bits a, Bits w) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(w));
#else
  return fma(high_halves(a), high_halves(w), fma(low_halves(a), low_halves(w), sum));
#endif
}

template <int R>
void multiply_tile(const Call& call, int64_t row, int64_t panel) {
  const int64_t stride = padded(call.weight->in_features);
  const uint32_t* w = panel_of(*call.weight, panel);
  const bf16* x = call.x + row * stride;
  Vec sum[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) sum[r][v] = zero();
  for (int64_t k = 0; k < stride; k += 2) {
    Bits words[kVectors];
    for (int v = 0; v < kVectors; ++v) words[v] = load_bits(w + k / 2 * kPanel + v * kLanes);
    for (int r = 0; r < R; ++r) {
      uint32_t pair;
      std::memcpy(&pair, x + r * stride + k, sizeof pair);
      const Bits a = broadcast_bits(pair);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = add_products(sum[r][v], a, words[v]);
    }
  }
  alignas(64) float sums[R * kPanel];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * kLanes, sum[r][v]);
  finish(call, row, R, panel, sums);
}

template <int R = kTileRows>
void dispatch_rows(int64_t rows, const Call& call, int64_t row, int64_t panel) {
  if constexpr (R > 0) {
    if (rows == R)
      multiply_tile<R>(call, row, panel);
    else
      dispatch_rows<R - 1>(rows, call, row, panel);
  }
}

void multiply_share(const Call& call, int64_t begin, int64_t end) {
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t row = 0; row < call.rows; row += kTileRows)
      dispatch_rows(std::min<int64_t>(kTileRows, call.rows - row), call, row, panel);
}

#endif

// x with its rows padded to whole tiles, zeros where it has nothing. The memory is kept: a step takes none.
const bf16* pad_rows(const bf16* x, int64_t rows, int64_t in_features) {
  const int64_t stride = padded(in_features);
  if (stride == in_features && rows % kRowsMultiple == 0) return x;
  static thread_local std::vector<bf16> scratch;
  const int64_t all = (rows + kRowsMultiple - 1) / kRowsMultiple * kRowsMultiple;
  if (static_cast<int64_t>(scratch.size()) < all * stride) scratch.resize(all * stride);
  for (int64_t row = 0; row < all; ++row) {
    bf16* to = scratch.data() + row * stride;
    const int64_t taken = row < rows ? in_features : 0;
    std::copy(x + row * in_features, x + row * in_features + taken, to);
    std::fill(to + taken, to + stride, bf16{0});
  }
  return scratch.data();
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Words that the panels of a weight take.
OCTAVO_EXPORT int64_t octavo_linear_bf16_words(int64_t out_features, int64_t in_features) {
  return (out_features + kPanel - 1) / kPanel * kPanel * (padded(in_features) / 2);
}

// x is [rows, in], out [rows, out], both contiguous.
OCTAVO_EXPORT void octavo_linear_bf16(const Weight* weight, const bf16* x, bf16* out, int64_t rows) {
  const int64_t panels = (weight->out_features + kPanel - 1) / kPanel;
  const Call call{weight, pad_rows(x, rows, weight->in_features), out, rows};
  Shares shares;
  shares.start(panels, std::max<int64_t>(1, panels / (team_size() * 8)));
  on_team([&] {
    int64_t begin, end;
    while (shares.take(&begin, &end)) multiply_share(call, begin, end);
  });
}

// Rows of the weight, [count, in].
OCTAVO_EXPORT void octavo_linear_bf16_weight_rows(const Weight* weight, const int64_t* rows, bf16* out, int64_t count) {
  const int64_t in_features = weight->in_features;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t* column = panel_of(*weight, rows[i] / kPanel) + rows[i] % kPanel;
    for (int64_t k = 0; k < in_features; ++k)
      out[i * in_features + k] = static_cast<bf16>(column[k / 2 * kPanel] >> 16 * (k % 2));
  }
}

// weight is [out, in].
OCTAVO_EXPORT void octavo_pack_linear_bf16(const bf16* weight, int64_t out_features, int64_t in_features,
                                           uint32_t* panels) {
  const int64_t pairs = padded(in_features) / 2;
  const auto at = [&](int64_t row, int64_t k) -> uint32_t {
    return row < out_features && k < in_features ? weight[row * in_features + k] : 0;
  };
  for (int64_t panel = 0; panel * kPanel < out_features; ++panel)
    for (int64_t pair = 0; pair < pairs; ++pair)
      for (int64_t j = 0; j < kPanel; ++j) {
        const int64_t row = panel * kPanel + j;
        panels[(panel * pairs + pair) * kPanel + j] = at(row, 2 * pair) | at(row, 2 * pair + 1) << 16;
      }
}

OCTAVO_IN_PROGRAMS(octavo_linear_bf16)
OCTAVO_IN_PROGRAMS(octavo_linear_bf16_weight_rows)
