// What is done to each element alone, in place.
#include "../native/csrc/lanes.h"
#include "../native/csrc/program.h"

namespace octavo {
namespace {

// Elements that one thread works on alone, and takes at a time.
constexpr int64_t kPiece = 16 * 1024;

// Set each vector of y [count, width] to f(y, where it begins, elements from there on).
template <class T, class F>
void change(T* y, int64_t count, int64_t width, const F& f) {
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * width; i < end * width; i += kLanes) {
      const int64_t left = end * width - i;
      store_part(y + i, f(load_part(y + i, left, 0.0f), i, left), left);
    }
  });
}

template <class T>
void add_to(const T* x, T* y, int64_t count, int64_t width) {
  change(y, count, width, [&](Vec value, int64_t i, int64_t left) { return add(value, load_part(x + i, left, 0.0f)); });
}

template <class T>
void scale(T* x, int64_t count, int64_t width, float factor) {
  const Vec by = broadcast(factor);
  change(x, count, width, [&](Vec value, int64_t, int64_t) { return mul(value, by); });
}

}  // namespace
}  // namespace octavo

// x and y are contiguous, [count, width].
OCTAVO_EXPORT void octavo_add_to(const void* x, void* y, int64_t count, int64_t width, int32_t is_bfloat16) {
  using octavo::bf16;
  if (is_bfloat16)
    octavo::add_to(static_cast<const bf16*>(x), static_cast<bf16*>(y), count, width);
  else
    octavo::add_to(static_cast<const float*>(x), static_cast<float*>(y), count, width);
}

OCTAVO_EXPORT void octavo_scale(void* x, int64_t count, int64_t width, float factor, int32_t is_bfloat16) {
  if (is_bfloat16)
    octavo::scale(static_cast<octavo::bf16*>(x), count, width, factor);
  else
    octavo::scale(static_cast<float*>(x), count, width, factor);
}

OCTAVO_IN_PROGRAMS(octavo_add_to)
OCTAVO_IN_PROGRAMS(octavo_scale)
