// The custom operator of own_op.py: a row is read, normed, added, normed again and written while it lies in the nearest
// cache.
#include "octavo_op.h"

#include <cmath>

namespace {

using namespace octavo;

float scale_of(Vec squares, int64_t width, float eps) {
  float lanes[kLanes];
  store(lanes, squares);
  float total = 0;
  for (float lane : lanes) total += lane;
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

// What is left of a vector once it is stored.
Vec as_stored(const bf16*, Vec x) { return rounded_to_bf16(x); }
Vec as_stored(const float*, Vec x) { return x; }

template <class T>
void run(const T* x, const T* inner, const T* residual, const T* outer, T* h, T* y, int64_t rows, int64_t width,
         float inner_eps, float outer_eps) {
  // The threads are Octavo's own; small steps are done by one of them alone.
  share_rows(rows, width, 16 * 1024, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * width; r < end * width; r += width) {
      Vec squares = zero();
      for (int64_t i = 0; i < width; i += kLanes) {
        const Vec value = load_part(x + r + i, width - i, 0.0f);
        squares = fma(value, value, squares);
      }
      const Vec first = broadcast(scale_of(squares, width, inner_eps));
      squares = zero();
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        // Rounded as the norm's own result would be.
        const Vec normed = mul(mul(load_part(x + r + i, left, 0.0f), first), load_part(inner + i, left, 0.0f));
        const Vec sum = as_stored(h, add(as_stored(h, normed), load_part(residual + r + i, left, 0.0f)));
        squares = fma(sum, sum, squares);
        store_part(h + r + i, sum, left);
      }
      const Vec second = broadcast(scale_of(squares, width, outer_eps));
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        store_part(y + r + i, mul(mul(load_part(h + r + i, left, 0.0f), second), load_part(outer + i, left, 0.0f)), left);
      }
    }
  });
}

}  // namespace

// x, residual, h and y are [rows, width], inner and outer [width]; all are contiguous.
OCTAVO_EXPORT void norm_add_norm(const void* x, const void* inner, const void* residual, const void* outer, void* h,
                                 void* y, int64_t rows, int64_t width, float inner_eps, float outer_eps,
                                 int32_t is_bfloat16) {
  const auto call = [&]<class T>(const T*) {
    run(static_cast<const T*>(x), static_cast<const T*>(inner), static_cast<const T*>(residual),
        static_cast<const T*>(outer), static_cast<T*>(h), static_cast<T*>(y), rows, width, inner_eps, outer_eps);
  };
  if (is_bfloat16)
    call(static_cast<const bf16*>(nullptr));
  else
    call(static_cast<const float*>(nullptr));
}

// It may be part of recorded steps.
OCTAVO_IN_PROGRAMS(norm_add_norm)
