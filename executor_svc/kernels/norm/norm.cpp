// RMSNorm, alone and after a residual add.
//
// The squares are summed in kColumns running sums, column i taking the elements i, i + kColumns, ..., which are then
// folded in halves: an order that the width of a row alone decides, the same on every instruction set.
#include <cmath>

#include "../native/csrc/lanes.h"
#include "../native/csrc/program.h"

namespace octavo {
namespace {

constexpr int kColumns = 32;
constexpr int kVecs = kColumns / kLanes;
// Elements that one thread works on alone, and takes at a time.
constexpr int64_t kPiece = 16 * 1024;

struct SquareSum {
  Vec sums[kVecs];
  SquareSum() {
    for (Vec& sum : sums) sum = zero();
  }
  void add_square(int v, Vec x) { sums[v] = fma(x, x, sums[v]); }
  float total() const {
    float columns[kColumns];
    for (int v = 0; v < kVecs; ++v) store(columns + v * kLanes, sums[v]);
    for (int width = kColumns / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) columns[i] += columns[i + width];
    return columns[0];
  }
};

// Adds `x` to `row` first where there is one.
template <class T>
void normalize(const T* x, T* row, const T* weight, T* out, int64_t width, float eps) {
  SquareSum squares;
  int v = 0;
  for (int64_t i = 0; i < width; i += kLanes, v = (v + 1) % kVecs) {
    Vec value = load_part(row + i, width - i, 0.0f);
    if (x) {
      store_part(row + i, add(value, load_part(x + i, width - i, 0.0f)), width - i);
      // What is normalized is the rounded sum.
      value = load_part(row + i, width - i, 0.0f);
    }
    squares.add_square(v, value);
  }
  const Vec scale = broadcast(1.0f / std::sqrt(squares.total() / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vec scaled = mul(load_part(row + i, width - i, 0.0f), scale);
    store_part(out + i, mul(scaled, load_part(weight + i, width - i, 0.0f)), width - i);
  }
}

template <class T>
void normalize_rows(const void* x, void* rows, const void* weight, void* out, int64_t count, int64_t width, float eps) {
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      normalize(x ? static_cast<const T*>(x) + r * width : nullptr, static_cast<T*>(rows) + r * width,
                static_cast<const T*>(weight), static_cast<T*>(out) + r * width, width, eps);
  };
  share_rows(count, width, kPiece, some);
}

}  // namespace
}  // namespace octavo

// All contiguous: x (null: nothing is added), rows and out are [count, width], weight [width]. rows changes only where
// x is given.
OCTAVO_EXPORT void octavo_rms_norm(const void* x, void* rows, const void* weight, void* out, int64_t count,
                                   int64_t width, float eps, int32_t is_bfloat16) {
  if (is_bfloat16)
    octavo::normalize_rows<octavo::bf16>(x, rows, weight, out, count, width, eps);
  else
    octavo::normalize_rows<float>(x, rows, weight, out, count, width, eps);
}

OCTAVO_IN_PROGRAMS(octavo_rms_norm)
