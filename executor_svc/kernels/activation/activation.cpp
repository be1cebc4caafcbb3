// Activations, plain and gated: f(x), and f(gate) * up.
#include "../native/csrc/program.h"
#include "functions.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 8 * 1024;

template <class Activation, class T>
void activate_rows(const void* x, void* out, int64_t count, int64_t width) {
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    const T* const from = static_cast<const T*>(x);
    T* const to = static_cast<T*>(out);
    // Rows lie side by side, and every element is its own.
    for (int64_t i = begin * width; i < end * width; i += kLanes) {
      const int64_t left = end * width - i;
      store_part(to + i, Activation::of(load_part(from + i, left, 0.0f)), left);
    }
  });
}

template <class Activation, class T>
void gate_rows(const void* gate_up, void* out, int64_t count, int64_t width) {
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* const gate = static_cast<const T*>(gate_up) + r * 2 * width;
      T* const to = static_cast<T*>(out) + r * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        const Vec up = load_part(gate + width + i, left, 0.0f);
        store_part(to + i, mul(Activation::of(load_part(gate + i, left, 0.0f)), up), left);
      }
    }
  });
}

template <class Activation>
void activate(const void* x, void* out, int64_t count, int64_t width, bool is_bfloat16) {
  if (is_bfloat16)
    activate_rows<Activation, bf16>(x, out, count, width);
  else
    activate_rows<Activation, float>(x, out, count, width);
}

template <class Activation>
void gate(const void* gate_up, void* out, int64_t count, int64_t width, bool is_bfloat16) {
  if (is_bfloat16)
    gate_rows<Activation, bf16>(gate_up, out, count, width);
  else
    gate_rows<Activation, float>(gate_up, out, count, width);
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// Gated: gate_up is [count, 2 * width]. Plain: x is [count, width]. out is [count, width]; all are contiguous.
OCTAVO_EXPORT void octavo_silu_and_mul(const void* gate_up, void* out, int64_t count, int64_t width,
                                       int32_t is_bfloat16) {
  gate<Silu>(gate_up, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_erf_and_mul(const void* gate_up, void* out, int64_t count, int64_t width,
                                           int32_t is_bfloat16) {
  gate<GeluErf>(gate_up, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_tanh_and_mul(const void* gate_up, void* out, int64_t count, int64_t width,
                                            int32_t is_bfloat16) {
  gate<GeluTanh>(gate_up, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_erf(const void* x, void* out, int64_t count, int64_t width, int32_t is_bfloat16) {
  activate<GeluErf>(x, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_gelu_tanh(const void* x, void* out, int64_t count, int64_t width, int32_t is_bfloat16) {
  activate<GeluTanh>(x, out, count, width, is_bfloat16 != 0);
}

OCTAVO_EXPORT void octavo_relu(const void* x, void* out, int64_t count, int64_t width, int32_t is_bfloat16) {
  activate<Relu>(x, out, count, width, is_bfloat16 != 0);
}

OCTAVO_IN_PROGRAMS(octavo_silu_and_mul)
OCTAVO_IN_PROGRAMS(octavo_gelu_erf_and_mul)
OCTAVO_IN_PROGRAMS(octavo_gelu_tanh_and_mul)
OCTAVO_IN_PROGRAMS(octavo_gelu_erf)
OCTAVO_IN_PROGRAMS(octavo_gelu_tanh)
OCTAVO_IN_PROGRAMS(octavo_relu)
