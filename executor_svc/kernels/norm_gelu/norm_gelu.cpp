// LayerNorm with a GELU behind it: a row is activated while it lies in the nearest cache, rounded as if it had been
// written out between.
#include "../activation/functions.h"
#include "../native/csrc/program.h"
#include "../norm/rows.h"

namespace octavo {
namespace {

// Elements that one thread works on alone, and takes at a time.
constexpr int64_t kPiece = 8 * 1024;

template <class Activation, class T>
void norm_rows(const T* x, const T* weight, const T* bias, T* out, int64_t count, int64_t width, float eps) {
  const T* const none = nullptr;
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* const to = out + r * width;
      // Nothing is added, so the row is only read.
      Layer::normalize(none, const_cast<T*>(x + r * width), weight, bias, to, width, eps);
      for (int64_t i = 0; i < width; i += kLanes)
        store_part(to + i, Activation::of(load_part(to + i, width - i, 0.0f)), width - i);
    }
  });
}

template <class T>
void norm_gelu(const void* x, const void* weight, const void* bias, void* out, int64_t count, int64_t width, float eps,
               bool tanh) {
  const auto run = tanh ? norm_rows<GeluTanh, T> : norm_rows<GeluErf, T>;
  run(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<T*>(out), count,
      width, eps);
}

}  // namespace
}  // namespace octavo

// x and out are [count, width], weight and bias (null: there is none) [width]; all are contiguous.
OCTAVO_EXPORT void octavo_norm_gelu(const void* x, const void* weight, const void* bias, void* out, int64_t count,
                                    int64_t width, float eps, int32_t tanh, int32_t is_bfloat16) {
  if (is_bfloat16)
    octavo::norm_gelu<octavo::bf16>(x, weight, bias, out, count, width, eps, tanh != 0);
  else
    octavo::norm_gelu<float>(x, weight, bias, out, count, width, eps, tanh != 0);
}

OCTAVO_IN_PROGRAMS(octavo_norm_gelu)
