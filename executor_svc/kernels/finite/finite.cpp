// Whether every number of a row is finite: 0 times a number is 0 where it is and NaN where it is not, and a sum with a
// NaN in it stays one.
#include "../native/csrc/lanes.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 64 * 1024;
constexpr int kSums = 4;

template <class T>
bool is_finite(const T* x, int64_t n) {
  Vec sums[kSums];
  for (Vec& sum : sums) sum = zero();
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
    for (int v = 0; v < kSums; ++v) sums[v] = fma(load(x + i + v * kLanes), zero(), sums[v]);
  for (; i < n; i += kLanes) sums[0] = fma(load_part(x + i, n - i, 0.0f), zero(), sums[0]);
  const Vec sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
  return mask_eq(sum, sum) == (1u << kLanes) - 1;
}

template <class T>
void check_rows(const void* values, int64_t rows, int64_t width, uint8_t* finite) {
  share_rows(rows, width, kPiece, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) finite[r] = is_finite(static_cast<const T*>(values) + r * width, width);
  });
}

}  // namespace
}  // namespace octavo

// values is [rows, width], finite [rows], both contiguous.
OCTAVO_EXPORT void octavo_finite_rows(const void* values, int64_t rows, int64_t width, int32_t is_bfloat16,
                                      uint8_t* finite) {
  if (is_bfloat16)
    octavo::check_rows<octavo::bf16>(values, rows, width, finite);
  else
    octavo::check_rows<float>(values, rows, width, finite);
}
