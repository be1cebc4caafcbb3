// RMSNorm and LayerNorm of a row.
//
// What is summed over a row is summed in kColumns running sums, column i taking the elements i, i + kColumns, ..., which
// are then folded in halves: an order that the width of a row alone decides, the same on every instruction set.
#pragma once

#include <cmath>

#include "../native/csrc/lanes.h"

namespace octavo {

constexpr int kColumns = 32;
constexpr int kVecs = kColumns / kLanes;
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

}  // namespace octavo
