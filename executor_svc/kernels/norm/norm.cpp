// RMSNorm and LayerNorm, alone and after a residual add.
//
// What is summed over a row is summed in kColumns running sums, column i taking the elements i, i + kColumns, ..., which
// are then folded in halves: an order that the width of a row alone decides, the same on every instruction set.
#include <cmath>

#include "../native/csrc/lanes.h"
#include "../native/csrc/program.h"

namespace octavo {
namespace {

constexpr int kColumns = 32;
constexpr int kVecs = kColumns / kLanes;
// Elements that one thread works on alone, and takes at a time.
constexpr int64_t kPiece = 16 * 1024;

struct Sum {
  Vec sums[kVecs];
  Sum() {
    for (Vec& sum : sums) sum = zero();
  }
  void add_square(int v, Vec x) { sums[v] = fma(x, x, sums[v]); }
  void add_to(int v, Vec x) { sums[v] = add(sums[v], x); }
  float total() const {
    float columns[kColumns];
    for (int v = 0; v < kVecs; ++v) store(columns + v * kLanes, sums[v]);
    for (int width = kColumns / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) columns[i] += columns[i + width];
    return columns[0];
  }
};

// Call f(v, i, left) for each vector of a row: its column of sums, where it begins, and the elements from there on.
template <class F>
void for_vectors(int64_t width, const F& f) {
  int v = 0;
  for (int64_t i = 0; i < width; i += kLanes, v = (v + 1) % kVecs) f(v, i, width - i);
}

// The vector of `row` at i, 0 behind its end; `x` is added to it in place first where there is one. What is normalized is
// the rounded sum.
template <class T>
Vec take(const T* x, T* row, int64_t i, int64_t left) {
  const Vec value = load_part(row + i, left, 0.0f);
  if (!x) return value;
  store_part(row + i, add(value, load_part(x + i, left, 0.0f)), left);
  return load_part(row + i, left, 0.0f);
}

struct Rms {
  template <class T>
  static void normalize(const T* x, T* row, const T* weight, const T*, T* out, int64_t width, float eps) {
    Sum squares;
    for_vectors(width, [&](int v, int64_t i, int64_t left) { squares.add_square(v, take(x, row, i, left)); });
    const Vec scale = broadcast(1.0f / std::sqrt(squares.total() / static_cast<float>(width) + eps));
    for_vectors(width, [&](int, int64_t i, int64_t left) {
      const Vec scaled = mul(load_part(row + i, left, 0.0f), scale);
      store_part(out + i, mul(scaled, load_part(weight + i, left, 0.0f)), left);
    });
  }
};

// Two passes, and a correction (Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance"): the
// differences to the mean as it was rounded are summed too, and what they leave is taken off mean and variance. A mean
// that is large beside the deviation costs no digits of either.
struct Layer {
  template <class T>
  static void normalize(const T* x, T* row, const T* weight, const T* bias, T* out, int64_t width, float eps) {
    const float count = static_cast<float>(width);
    Sum values;
    for_vectors(width, [&](int v, int64_t i, int64_t left) { values.add_to(v, take(x, row, i, left)); });
    const float rounded = values.total() / count;
    const Vec mean = broadcast(rounded);
    Sum differences, squares;
    for_vectors(width, [&](int v, int64_t i, int64_t left) {
      // Lanes behind the end differ by nothing.
      const Vec difference = sub(load_part(row + i, left, rounded), mean);
      differences.add_to(v, difference);
      squares.add_square(v, difference);
    });
    const float rest = differences.total() / count;
    const float variance = squares.total() / count - rest * rest;
    const Vec scale = broadcast(1.0f / std::sqrt(variance + eps)), correction = broadcast(rest);
    for_vectors(width, [&](int, int64_t i, int64_t left) {
      const Vec difference = sub(sub(load_part(row + i, left, rounded), mean), correction);
      const Vec scaled = mul(mul(difference, scale), load_part(weight + i, left, 0.0f));
      store_part(out + i, bias ? add(scaled, load_part(bias + i, left, 0.0f)) : scaled, left);
    });
  }
};

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
