// RMSNorm and LayerNorm, alone and after a residual add.
#include "../native/csrc/program.h"
#include "rows.h"

namespace octavo {
namespace {

// Elements that one thread works on alone, and takes at a time.
constexpr int64_t kPiece = 16 * 1024;

template <class Norm, class T>
void normalize_rows(const void* x, void* rows, const void* weight, const void* bias, void* out, int64_t count,
                    int64_t width, float eps) {
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      Norm::normalize(x ? static_cast<const T*>(x) + r * width : nullptr, static_cast<T*>(rows) + r * width,
                      static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<T*>(out) + r * width,
                      width, eps);
  };
  share_rows(count, width, kPiece, some);
}

// Each of `heads` runs of `width` elements from the start of a row on, in place; rows begin `stride` apart.
template <class T>
void normalize_heads(T* rows, const T* weight, int64_t count, int64_t stride, int64_t heads, int64_t width,
                     float eps) {
  const T* const none = nullptr;
  share_rows(count * heads, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      T* const head = rows + h / heads * stride + h % heads * width;
      Rms::normalize(none, head, weight, none, head, width, eps);
    }
  });
}

template <class Norm>
void normalize_any(const void* x, void* rows, const void* weight, const void* bias, void* out, int64_t count,
                   int64_t width, float eps, bool is_bfloat16) {
  if (is_bfloat16)
    normalize_rows<Norm, bf16>(x, rows, weight, bias, out, count, width, eps);
  else
    normalize_rows<Norm, float>(x, rows, weight, bias, out, count, width, eps);
}

}  // namespace
}  // namespace octavo

// All contiguous: x (null: nothing is added), rows and out are [count, width], weight and bias (null: there is none)
// [width]. rows changes only where x is given.
OCTAVO_EXPORT void octavo_rms_norm(const void* x, void* rows, const void* weight, void* out, int64_t count,
                                   int64_t width, float eps, int32_t is_bfloat16) {
  octavo::normalize_any<octavo::Rms>(x, rows, weight, nullptr, out, count, width, eps, is_bfloat16 != 0);
}

// rows is [count, stride], of which the first heads * width columns are normed in place; weight is [width].
OCTAVO_EXPORT void octavo_rms_norm_heads(void* rows, const void* weight, int64_t count, int64_t stride, int64_t heads,
                                         int64_t width, float eps, int32_t is_bfloat16) {
  using octavo::bf16;
  if (is_bfloat16)
    octavo::normalize_heads(static_cast<bf16*>(rows), static_cast<const bf16*>(weight), count, stride, heads, width,
                            eps);
  else
    octavo::normalize_heads(static_cast<float*>(rows), static_cast<const float*>(weight), count, stride, heads, width,
                            eps);
}

OCTAVO_EXPORT void octavo_layer_norm(const void* x, void* rows, const void* weight, const void* bias, void* out,
                                     int64_t count, int64_t width, float eps, int32_t is_bfloat16) {
  octavo::normalize_any<octavo::Layer>(x, rows, weight, bias, out, count, width, eps, is_bfloat16 != 0);
}

OCTAVO_IN_PROGRAMS(octavo_rms_norm)
OCTAVO_IN_PROGRAMS(octavo_rms_norm_heads)
OCTAVO_IN_PROGRAMS(octavo_layer_norm)
