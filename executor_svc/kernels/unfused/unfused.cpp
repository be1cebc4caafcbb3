// The ops that others are made of, each by itself: what a graph runs where a fusion is switched off.
#include <cstring>

#include "../activation/functions.h"
#include "../native/csrc/program.h"
#include "../rotary_write_kv/turn.h"

namespace octavo {
namespace {

// Elements that one thread works on alone, and takes at a time.
constexpr int64_t kPiece = 16 * 1024;

// Set each vector of out [count, width] to f of those of x and y, whose rows lie further apart.
template <class T, class F>
void join(const void* x, const void* y, void* out, int64_t count, int64_t width, int64_t x_stride, int64_t y_stride,
          const F& f) {
  share_rows(count, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* const first = static_cast<const T*>(x) + r * x_stride;
      const T* const second = static_cast<const T*>(y) + r * y_stride;
      T* const to = static_cast<T*>(out) + r * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        store_part(to + i, f(load_part(first + i, left, 0.0f), load_part(second + i, left, 0.0f)), left);
      }
    }
  });
}

template <class F>
void join_any(const void* x, const void* y, void* out, int64_t count, int64_t width, int64_t x_stride,
              int64_t y_stride, bool is_bfloat16, const F& f) {
  if (is_bfloat16)
    join<bf16>(x, y, out, count, width, x_stride, y_stride, f);
  else
    join<float>(x, y, out, count, width, x_stride, y_stride, f);
}

template <class T>
void turn_rows(const void* x, void* out, const float* cos, const float* sin, int64_t tokens, int64_t heads,
               int64_t head_dim, int64_t half, int64_t stride) {
  share_rows(tokens, heads * head_dim, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* const from = static_cast<const T*>(x) + token * stride;
      T* const to = static_cast<T*>(out) + token * heads * head_dim;
      for (int64_t head = 0; head < heads; ++head)
        turn(from + head * head_dim, cos + token * half, sin + token * half, half, head_dim, to + head * head_dim);
    }
  });
}

template <class T>
void write_rows(const void* from, const int64_t* slots, void* to, int64_t tokens, int64_t width, int64_t stride) {
  for (int64_t token = 0; token < tokens; ++token)
    std::memcpy(static_cast<T*>(to) + slots[token] * width, static_cast<const T*>(from) + token * stride,
                static_cast<size_t>(width) * sizeof(T));
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// out is contiguous, [count, width]; rows of x and y begin x_stride and y_stride elements apart.
OCTAVO_EXPORT void octavo_add(const void* x, const void* y, void* out, int64_t count, int64_t width, int64_t x_stride,
                              int64_t y_stride, int32_t is_bfloat16) {
  join_any(x, y, out, count, width, x_stride, y_stride, is_bfloat16 != 0, [](Vec a, Vec b) { return add(a, b); });
}

OCTAVO_EXPORT void octavo_multiply(const void* x, const void* y, void* out, int64_t count, int64_t width,
                                   int64_t x_stride, int64_t y_stride, int32_t is_bfloat16) {
  join_any(x, y, out, count, width, x_stride, y_stride, is_bfloat16 != 0, [](Vec a, Vec b) { return mul(a, b); });
}

OCTAVO_EXPORT void octavo_silu(const void* x, void* out, int64_t count, int64_t width, int64_t stride,
                               int32_t is_bfloat16) {
  join_any(x, x, out, count, width, stride, stride, is_bfloat16 != 0, [](Vec a, Vec) { return Silu::of(a); });
}

// x is [tokens][heads][head_dim], tokens `stride` elements apart; out likewise, contiguous. 2 * half elements turn.
OCTAVO_EXPORT void octavo_rotary(const void* x, void* out, const float* cos, const float* sin, int64_t tokens,
                                 int64_t heads, int64_t head_dim, int64_t half, int64_t stride, int32_t is_bfloat16) {
  if (is_bfloat16)
    turn_rows<bf16>(x, out, cos, sin, tokens, heads, head_dim, half, stride);
  else
    turn_rows<float>(x, out, cos, sin, tokens, heads, head_dim, half, stride);
}

// key and value are [tokens][width], tokens their strides apart; the caches are [slots][width].
OCTAVO_EXPORT void octavo_write_kv(const void* key, const void* value, const int64_t* slots, void* keys, void* values,
                                   int64_t tokens, int64_t width, int64_t key_stride, int64_t value_stride,
                                   int32_t is_bfloat16) {
  if (is_bfloat16) {
    write_rows<bf16>(key, slots, keys, tokens, width, key_stride);
    write_rows<bf16>(value, slots, values, tokens, width, value_stride);
  } else {
    write_rows<float>(key, slots, keys, tokens, width, key_stride);
    write_rows<float>(value, slots, values, tokens, width, value_stride);
  }
}

OCTAVO_IN_PROGRAMS(octavo_add)
OCTAVO_IN_PROGRAMS(octavo_multiply)
OCTAVO_IN_PROGRAMS(octavo_silu)
OCTAVO_IN_PROGRAMS(octavo_rotary)
OCTAVO_IN_PROGRAMS(octavo_write_kv)
