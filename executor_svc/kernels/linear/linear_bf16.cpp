// Linear layers of bfloat16 activations and weights, summed in float32.
//
// AVX512-BF16 multiplies and adds a pair of inputs by one instruction; AMX multiplies 16 rows of 32 inputs by 16 columns,
// from the very same layout (tiles.h). Elsewhere a word is split by a shift and a mask, and the arithmetic is float32's.
//
// An output is one running sum over the pairs, in order, whatever the number of rows.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "../native/csrc/program.h"
#include "../native/csrc/shares.h"
#include "bf16.h"

#if defined(OCTAVO_EMULATE_AMX) || defined(__AMX_BF16__)
#include "tile_pairs.h"
#else

namespace octavo {
namespace {

constexpr int kTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;

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

// A gate and what it is for lie far apart, and a share of the work has few columns.
bool takes_gate(int64_t) { return false; }

void multiply(const Call& call) {
  Call deep = call;
  deep.x = rows_as_deep(call);
  const int64_t panels = num_panels(*call.weight);
  Shares shares;
  shares.start_in_order(panels, std::max<int64_t>(1, panels / (team_size() * 8)));
  on_team([&] {
    const Part part(deep);
    int64_t begin, end;
    while (shares.take(&begin, &end)) multiply_share(deep, begin, end);
  });
}

}  // namespace
}  // namespace octavo

#endif

using namespace octavo;

// Elements of the weight's rows that one thread takes at a time: each comes with a line of memory of its own.
constexpr int64_t kPiece = 32 * 1024;

// Words that the panels of a weight take.
OCTAVO_EXPORT int64_t octavo_linear_bf16_words(int64_t out_features, int64_t in_features) {
  return num_panels(Weight{nullptr, nullptr, out_features, in_features}) * kPanel * (padded(in_features) / 2);
}

// Whether the gated epilogues can be put behind the products of a weight of so many columns.
OCTAVO_EXPORT int32_t octavo_linear_bf16_takes_gate(int64_t out_features) { return takes_gate(out_features); }

// x is [rows, in], out [rows, out] or half as wide, both contiguous, bfloat16 or, by its epilogue, float32.
OCTAVO_EXPORT void octavo_linear_bf16(const Weight* weight, const bf16* x, void* out, int64_t rows, int32_t epilogue) {
  multiply(Call{weight, x, out, rows, static_cast<Epilogue>(epilogue)});
}

// tokens is [rows], finite [rows]: the column of the highest product, the first of equals, and whether all were finite.
// There are no more than 2^24 columns.
OCTAVO_EXPORT void octavo_linear_bf16_likeliest(const Weight* weight, const bf16* x, int64_t* tokens, uint8_t* finite,
                                                int64_t rows) {
  static thread_local std::unique_ptr<Likeliest[]> found;
  static thread_local int64_t room = 0;
  if (room < rows) {
    found = std::make_unique<Likeliest[]>(static_cast<size_t>(rows));
    room = rows;
  }
  for (int64_t row = 0; row < rows; ++row) found[row].begin();
  multiply(Call{weight, x, found.get(), rows, kLikeliest});
  for (int64_t row = 0; row < rows; ++row) {
    tokens[row] = found[row].column();
    finite[row] = found[row].is_finite();
  }
}

// Rows of the weight, [count, in].
OCTAVO_EXPORT void octavo_linear_bf16_weight_rows(const Weight* weight, const int64_t* rows, bf16* out, int64_t count) {
  const int64_t in_features = weight->in_features;
  share_rows(count, in_features, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t* column = panel_of(*weight, rows[i] / kPanel) + rows[i] % kPanel;
      for (int64_t k = 0; k < in_features; ++k)
        out[i * in_features + k] = static_cast<bf16>(column[k / 2 * kPanel] >> 16 * (k % 2));
    }
  });
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
