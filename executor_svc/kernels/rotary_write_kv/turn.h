// The rotary embedding of one head.
//
// The two products of a pair are rounded before they are added, as the reference rounds them.
#pragma once

#include <cstring>

#include "../native/csrc/simd.h"

namespace octavo {

// head_dim elements, of which the first 2 * half turn, in pairs that lie half apart.
template <class T>
void turn(const T* from, const float* cos, const float* sin, int64_t half, int64_t head_dim, T* to) {
  std::memcpy(to + 2 * half, from + 2 * half, static_cast<size_t>(head_dim - 2 * half) * sizeof(T));
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec first = load(from + i), second = load(from + half + i), c = load(cos + i), s = load(sin + i);
    store(to + i, sub(mul(first, c), mul(second, s)));
    store(to + half + i, add(mul(second, c), mul(first, s)));
  }
  if (i == half) return;
  // The rest by the same vectors, from copies.
  const int64_t rest = half - i;
  float parts[4][kLanes] = {};
  T turned[2][kLanes];
  for (int64_t j = 0; j < rest; ++j) {
    parts[0][j] = widen(from[i + j]);
    parts[1][j] = widen(from[half + i + j]);
    parts[2][j] = cos[i + j];
    parts[3][j] = sin[i + j];
  }
  const Vec first = load(parts[0]), second = load(parts[1]), c = load(parts[2]), s = load(parts[3]);
  store(turned[0], sub(mul(first, c), mul(second, s)));
  store(turned[1], add(mul(second, c), mul(first, s)));
  std::memcpy(to + i, turned[0], static_cast<size_t>(rest) * sizeof(T));
  std::memcpy(to + half + i, turned[1], static_cast<size_t>(rest) * sizeof(T));
}

}  // namespace octavo
