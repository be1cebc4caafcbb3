// The gated activation: silu(gate) * up.
#include "../native/csrc/lanes.h"
#include "../native/csrc/program.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 8 * 1024;

template <class T>
void gate_row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t count = width - i;
    const Vec g = load_part(gate + i, count, 0.0f);
    const Vec sigmoid_below = add(broadcast(1.0f), exp(sub(zero(), g)));
    store_part(out + i, mul(div(g, sigmoid_below), load_part(up + i, count, 0.0f)), count);
  }
}

template <class T>
void gate_rows(const void* gate_up, void* out, int64_t count, int64_t width) {
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* gate = static_cast<const T*>(gate_up) + r * 2 * width;
      gate_row(gate, gate + width, static_cast<T*>(out) + r * width, width);
    }
  });
}

}  // namespace
}  // namespace octavo

// gate_up is [count, 2 * width], out [count, width], both contiguous.
OCTAVO_EXPORT void octavo_silu_and_mul(const void* gate_up, void* out, int64_t count, int64_t width,
                                       int32_t is_bfloat16) {
  if (is_bfloat16)
    octavo::gate_rows<octavo::bf16>(gate_up, out, count, width);
  else
    octavo::gate_rows<float>(gate_up, out, count, width);
}

OCTAVO_IN_PROGRAMS(octavo_silu_and_mul)
