// A packed weight of bfloat16, and a call of it.
//
// Weights lie in pairs: a 32-bit word holds one column's weights for two neighbouring inputs, and the activations come in
// the same pairs, so that one instruction multiplies both and adds both where the processor has it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../native/csrc/lanes.h"

namespace octavo {
namespace {

// Inputs that a weight is padded to with zeros: the depth of a tile of AMX, and of one step.
constexpr int64_t kDepth = 32;
// Columns of a panel: a tile of AMX, two vectors of AVX-512.
#if defined(OCTAVO_EMULATE_AMX) || defined(__AMX_BF16__)
constexpr int kPanel = 16;
#else
constexpr int kPanel = 32;
#endif
constexpr int kVectors = kPanel / kLanes;

struct Weight {
  const uint32_t* panels;  // [out / kPanel, rounded up][in / 2, padded][kPanel]
  const float* bias;       // [out], or null
  int64_t out_features;
  int64_t in_features;
};

struct Call {
  const Weight* weight;
  const bf16* x;  // [rows][in]
  void* out;      // [rows][out], float32 or bfloat16
  int64_t rows;
  bool to_float32;
};

int64_t padded(int64_t in_features) { return (in_features + kDepth - 1) / kDepth * kDepth; }

int64_t num_panels(const Weight& weight) { return (weight.out_features + kPanel - 1) / kPanel; }

const uint32_t* panel_of(const Weight& weight, int64_t panel) {
  return weight.panels + panel * (padded(weight.in_features) / 2) * kPanel;
}

template <class T>
void finish_as(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  const Weight& weight = *call.weight;
  const int64_t column = panel * kPanel;
  const int64_t width = std::min<int64_t>(kPanel, weight.out_features - column);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec bias = weight.bias ? load_part(weight.bias + column + i, width - i, 0.0f) : zero();
    T* const to = static_cast<T*>(call.out) + row * weight.out_features + column + i;
    for (int64_t r = 0; r < rows; ++r)
      store_part(to + r * weight.out_features, add(load(sums + r * kPanel + i), bias), width - i);
  }
}

// Write the columns of a panel, of some rows. `sums` is [rows][kPanel].
void finish(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  if (call.to_float32)
    finish_as<float>(call, row, rows, panel, sums);
  else
    finish_as<bf16>(call, row, rows, panel, sums);
}

}  // namespace
}  // namespace octavo
