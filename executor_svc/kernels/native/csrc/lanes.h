// More of a vector than simd.h has: comparisons as bit masks, and lanes widened to float64 and int64, half a vector at a
// time. For kernels that select and count.
#pragma once

#include "shares.h"
#include "simd.h"

namespace octavo {

constexpr int kHalf = kLanes / 2;
typedef double Doubles __attribute__((vector_size(kHalf * 8)));
typedef int64_t Int64s __attribute__((vector_size(kHalf * 8)));

static inline Doubles all_doubles(double x) { return Doubles{} + x; }
static inline Doubles absolute(Doubles x) {
  return reinterpret_cast<Doubles>(reinterpret_cast<Int64s>(x) & INT64_MAX);
}
static inline int64_t sum_lanes(Int64s x) {
  int64_t sum = 0;
  for (int i = 0; i < kHalf; ++i) sum += x[i];
  return sum;
}

// Bit i is set where lane i of a is at least (above, equal to) that of b; never where one of them is NaN.
#if defined(__AVX512F__)

static inline uint32_t mask_ge(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline uint32_t mask_gt(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline uint32_t mask_eq(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
// x where a is at least (above) b, 0 elsewhere; x or else y.
static inline Vec where_ge(Vec x, Vec a, Vec b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x); }
static inline Vec where_gt(Vec x, Vec a, Vec b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x); }
static inline Vec either_ge(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), x);
}
static inline Doubles low_doubles(Vec x) { return (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
static inline Doubles high_doubles(Vec x) { return (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
static inline Vec narrow(Doubles low, Doubles high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low)), _mm512_cvtpd_ps((__m512d)high), 1);
}
static inline Doubles fma(Doubles a, Doubles b, Doubles c) {
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
// Whole numbers of the lanes, cut off; each lane is in the range of int32.
static inline void store_whole(int32_t* p, Vec x) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(x)); }
// y times 2 to the power of the whole number n; y and the result are normal.
static inline Vec scale_by_exp2(Vec y, Vec n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
}

#elif defined(__AVX2__)

static inline uint32_t mask_ge(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
static inline uint32_t mask_gt(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
static inline uint32_t mask_eq(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
static inline Vec where_ge(Vec x, Vec a, Vec b) { return _mm256_and_ps(x, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
static inline Vec where_gt(Vec x, Vec a, Vec b) { return _mm256_and_ps(x, _mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
static inline Vec either_ge(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
static inline Doubles low_doubles(Vec x) { return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
static inline Doubles high_doubles(Vec x) { return (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
static inline Vec narrow(Doubles low, Doubles high) {
  return _mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
}
static inline Doubles fma(Doubles a, Doubles b, Doubles c) {
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
static inline void store_whole(int32_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(x));
}
static inline Vec scale_by_exp2(Vec y, Vec n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}

#else

static inline uint32_t bits_of(Whole truth) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= truth[i] ? 1u << i : 0u;
  return bits;
}
static inline uint32_t mask_ge(Vec a, Vec b) { return bits_of(a >= b); }
static inline uint32_t mask_gt(Vec a, Vec b) { return bits_of(a > b); }
static inline uint32_t mask_eq(Vec a, Vec b) { return bits_of(a == b); }
static inline Vec where_ge(Vec x, Vec a, Vec b) { return reinterpret_cast<Vec>(reinterpret_cast<Whole>(x) & (a >= b)); }
static inline Vec where_gt(Vec x, Vec a, Vec b) { return reinterpret_cast<Vec>(reinterpret_cast<Whole>(x) & (a > b)); }
static inline Vec either_ge(Vec a, Vec b, Vec x, Vec y) { return a >= b ? x : y; }
static inline Doubles low_doubles(Vec x) { return Doubles{x[0], x[1]}; }
static inline Doubles high_doubles(Vec x) { return Doubles{x[2], x[3]}; }
static inline Vec narrow(Doubles low, Doubles high) {
  return Vec{static_cast<float>(low[0]), static_cast<float>(low[1]), static_cast<float>(high[0]),
             static_cast<float>(high[1])};
}
static inline Doubles fma(Doubles a, Doubles b, Doubles c) { return a * b + c; }
static inline void store_whole(int32_t* p, Vec x) {
  const Whole whole = __builtin_convertvector(x, Whole);
  std::memcpy(p, &whole, sizeof whole);
}
static inline Vec scale_by_exp2(Vec y, Vec n) {
  return reinterpret_cast<Vec>(reinterpret_cast<Whole>(y) + (__builtin_convertvector(n, Whole) << 23));
}

#endif

// exp(x) of x that are float64, for x up to 88, within 2 units in the last place of float32 also where x is large; see
// exp_by_parts.
static inline Vec exp(Doubles low, Doubles high) {
  const Vec x = narrow(low, high), n = exp_whole_part(clamp_exp(x));
  const Doubles log_2 = all_doubles(-0.69314718055994530942);
  return exp_by_parts(x, n, narrow(fma(low_doubles(n), log_2, low), fma(high_doubles(n), log_2, high)));
}

// tanh(x) within 2 units in the last place, 1 and -1 at the ends, NaN for NaN. Near 0 it is x times a polynomial in x^2,
// fitted to a relative error of 2^-29; elsewhere it comes from exp(-2|x|).
static inline Vec tanh(Vec x) {
  const Vec one = broadcast(1.0f), size = absolute(x), square = mul(x, x);
  Vec factor = broadcast(-0.00623555947f);
  factor = fma(factor, square, broadcast(0.0210396759f));
  factor = fma(factor, square, broadcast(-0.0538427085f));
  factor = fma(factor, square, broadcast(0.133324608f));
  factor = fma(factor, square, broadcast(-0.333333105f));
  const Vec small = fma(mul(factor, square), x, x);
  const Vec decay = exp(mul(size, broadcast(-2.0f)));
  const Vec large = sub(one, div(add(decay, decay), add(one, decay)));
  return either_ge(size, broadcast(0.55f), either_ge(x, zero(), large, sub(zero(), large)), small);
}

// The `count` numbers from p on, fewer than kLanes or as many, and `rest` in the other lanes.
template <class T>
static inline Vec load_part(const T* p, int64_t count, float rest) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? widen(p[i]) : rest;
  return load(lanes);
}
template <class T>
static inline void store_part(T* p, Vec x, int64_t count) {
  if (count >= kLanes) {
    store(p, x);
    return;
  }
  float lanes[kLanes];
  store(lanes, x);
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == sizeof(bf16))
      p[i] = to_bf16(lanes[i]);
    else
      p[i] = lanes[i];
  }
}

// Call work(begin, end) for `count` rows of `width` elements over the team, in pieces of about `piece` elements; what is
// no more than one piece stays on the calling thread.
template <class F>
void share_rows(int64_t count, int64_t width, int64_t piece, const F& work) {
  if (count * width <= piece || count <= 1) {
    work(0, count);
    return;
  }
  Shares shares;
  shares.start(count, width >= piece ? 1 : piece / width);
  on_team([&] {
    int64_t begin, end;
    while (shares.take(&begin, &end)) work(begin, end);
  });
}

}  // namespace octavo
