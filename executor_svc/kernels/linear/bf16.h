// A packed weight of bfloat16, and a call of it.
//
// Weights lie in pairs: a 32-bit word holds one column's weights for two neighbouring inputs, and the activations come in
// the same pairs, so that one instruction multiplies both and adds both where the processor has it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../activation/functions.h"
#include "../native/csrc/lanes.h"
#include "likeliest.h"

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

// What becomes of the sums: they are rounded to bfloat16, or not, or an activation of what they are rounded to is taken.
// The gated ones take the first half of the columns for the gate of the second, and halve the width.
enum Epilogue : int32_t {
  kToBfloat16,
  kToFloat32,
  kGeluErf,
  kGeluTanh,
  kRelu,
  kSiluAndMul,
  kGeluErfAndMul,
  kGeluTanhAndMul,
  kLikeliest,  // nothing is written but, at the end, the likeliest column of each row: out is Likeliest[rows]
};

struct Call {
  const Weight* weight;
  const bf16* x;  // [rows][in]
  void* out;      // [rows][out, or half of it], bfloat16 or float32
  int64_t rows;
  Epilogue epilogue;

  bool is_gated() const { return epilogue >= kSiluAndMul && epilogue <= kGeluTanhAndMul; }
  int64_t width() const { return is_gated() ? weight->out_features / 2 : weight->out_features; }
};

int64_t padded(int64_t in_features) { return (in_features + kDepth - 1) / kDepth * kDepth; }

int64_t num_panels(const Weight& weight) { return (weight.out_features + kPanel - 1) / kPanel; }

const uint32_t* panel_of(const Weight& weight, int64_t panel) {
  return weight.panels + panel * (padded(weight.in_features) / 2) * kPanel;
}

// What a thread keeps memory for: each may be in use at the same time.
enum Use { kRows, kPasses, kStretches };

// The memory is kept: a step takes none.
template <class T, Use>
T* memory_for(int64_t elements) {
  constexpr int64_t kLine = 64 / sizeof(T);
  static thread_local std::vector<T> memory;
  if (static_cast<int64_t>(memory.size()) < elements + kLine) memory.resize(static_cast<size_t>(elements + kLine));
  return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) % 64) / sizeof(T);
}

// x, whose rows go on with zeros where weights are deeper than they.
const bf16* rows_as_deep(const Call& call) {
  const int64_t in_features = call.weight->in_features, stride = padded(in_features);
  if (stride == in_features) return call.x;
  bf16* const copy = memory_for<bf16, kRows>(call.rows * stride);
  for (int64_t row = 0; row < call.rows; ++row) {
    std::memcpy(copy + row * stride, call.x + row * in_features, static_cast<size_t>(in_features) * sizeof(bf16));
    std::fill(copy + row * stride + in_features, copy + (row + 1) * stride, bf16{0});
  }
  return copy;
}

// Write the columns of a panel, of some rows: of(the sums and the bias, how far they are from the first of the panel's).
// `sums` is [rows][kPanel].
template <class T, class F>
void write_panel(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* sums, const F& of) {
  const Weight& weight = *call.weight;
  const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, call.width() - column);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec bias = weight.bias ? load_part(weight.bias + column + i, width - i, 0.0f) : zero();
    T* const to = static_cast<T*>(call.out) + row * call.width() + column + i;
    for (int64_t r = 0; r < rows; ++r)
      store_part(to + r * call.width(), of(add(load(sums + r * kPanel + i), bias), r * kPanel + i), width - i);
  }
}

template <class Activation>
void activate_panel(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  write_panel<bf16>(call, row, rows, panel, sums, [](Vec x, int64_t) { return Activation::of(rounded_to_bf16(x)); });
}

// What this thread has seen of the call that it works on.
Looking& looking() {
  static thread_local Looking mine;
  return mine;
}

void look_at_panel(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  const Weight& weight = *call.weight;
  const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, weight.out_features - column);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec bias = weight.bias ? load_part(weight.bias + column + i, width - i, 0.0f) : zero();
    looking().look(row, rows, sums + i, kPanel, bias, column + i, width - i);
  }
}

// The columns of a panel, of some rows, where there is no gate.
void finish(const Call& call, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  const auto same = [](Vec x, int64_t) { return x; };
  switch (call.epilogue) {
    case kToFloat32: return write_panel<float>(call, row, rows, panel, sums, same);
    case kGeluErf: return activate_panel<GeluErf>(call, row, rows, panel, sums);
    case kGeluTanh: return activate_panel<GeluTanh>(call, row, rows, panel, sums);
    case kRelu: return activate_panel<Relu>(call, row, rows, panel, sums);
    case kLikeliest: return look_at_panel(call, row, rows, panel, sums);
    default: return write_panel<bf16>(call, row, rows, panel, sums, same);
  }
}

// A thread's part in a call, from before its first panel to after its last.
class Part {
 public:
  explicit Part(const Call& call) : call_(call) {
    if (call.epilogue == kLikeliest) looking().begin(call.rows);
  }
  ~Part() {
    if (call_.epilogue == kLikeliest) looking().end(call_.rows, static_cast<Likeliest*>(call_.out));
  }
  Part(const Part&) = delete;

 private:
  const Call& call_;
};

}  // namespace
}  // namespace octavo
