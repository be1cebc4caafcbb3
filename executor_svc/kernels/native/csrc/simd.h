// Vectors of float32, as wide as the instruction set this file is compiled for has them.
//
// Kernels are written once over `Vec` and these few functions; each instruction set compiles the same source. A fused
// multiply-add rounds once on every set, and every kernel adds in an order that its inputs' shapes alone decide, so the
// same numbers come out however wide the vectors are where a kernel keeps one running sum for each output.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {

// A bfloat16 is the upper half of a float32.
using bf16 = uint16_t;

static inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
static inline float widen(float x) { return x; }

// To nearest, ties to even; NaN stays NaN.
static inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Vec = __m512;
using Bits = __m512i;
static inline Vec zero() { return _mm512_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
static inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
static inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline Vec round_even(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
// 2 to the power of the whole number x, -126 to 127.
static inline Vec exp2_whole(Vec x) {
  const Bits exponent = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}
static inline Bits load_bits(const void* p) { return _mm512_loadu_si512(p); }
static inline Bits broadcast_bits(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
static inline Vec low_halves(Bits x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
static inline Vec high_halves(Bits x) {
  return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// kLanes bfloat16 in a row.
static inline Vec load(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using Vec = __m256;
using Bits = __m256i;
static inline Vec zero() { return _mm256_setzero_ps(); }
static inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
static inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
static inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
static inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
static inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
static inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
static inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
static inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
static inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline Vec round_even(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline Vec exp2_whole(Vec x) {
  const Bits exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
static inline Bits load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline Bits broadcast_bits(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
static inline Vec low_halves(Bits x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
static inline Vec high_halves(Bits x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
static inline Vec load(const bf16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}

#else

// Four lanes of the compiler's own vectors: any processor.
constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef int32_t Whole __attribute__((vector_size(16)));
static inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
static inline Vec zero() { return broadcast(0.0f); }
static inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
static inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
static inline Vec add(Vec a, Vec b) { return a + b; }
static inline Vec sub(Vec a, Vec b) { return a - b; }
static inline Vec mul(Vec a, Vec b) { return a * b; }
static inline Vec div(Vec a, Vec b) { return a / b; }
static inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
static inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
static inline Vec round_even(Vec x) {
  // Adding 1.5 * 2^23 leaves no bit behind the point.
  const Vec shift = broadcast(12582912.0f);
  return (x + shift) - shift;
}
static inline Vec exp2_whole(Vec x) {
  const Bits exponent = reinterpret_cast<Bits>(__builtin_convertvector(x, Whole) + 127) << 23;
  return reinterpret_cast<Vec>(exponent);
}
static inline Bits load_bits(const void* p) {
  Bits x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
static inline Bits broadcast_bits(uint32_t x) { return Bits{x, x, x, x}; }
static inline Vec low_halves(Bits x) { return reinterpret_cast<Vec>(x << 16); }
static inline Vec high_halves(Bits x) { return reinterpret_cast<Vec>(x & 0xffff0000u); }
static inline Vec load(const bf16* p) { return Vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }

#endif

static inline void store(bf16* p, Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(lanes[i]);
}

// Sum and maximum of the lanes, in a fixed order: halves are folded onto each other.
static inline float sum_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}
static inline float max_lane(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// The larger and the smaller lane; where one of the two is NaN, b: put what may be NaN there to keep it.
static inline Vec max(Vec a, Vec b);
static inline Vec min(Vec a, Vec b);

// exp(x) for x up to 88, NaN for NaN, within 2 units in the last place; 0 below -87.3, minus infinity included, where the exact value
// is below the smallest normal float32. x = n * log(2) + r with |r| <= log(2) / 2; exp(r) is its Taylor polynomial of
// degree 7, whose rest is below 2^-27 there; log(2) is subtracted in two parts (Cody and Waite 1980) so that r is exact.
static inline Vec exp(Vec x) {
  const Vec lowest = broadcast(-87.33654f);
  const Vec clamped = min(broadcast(88.3f), max(lowest, x));
  const Vec n = round_even(mul(clamped, broadcast(1.44269504f)));
  const Vec r = fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), clamped));
  Vec y = broadcast(1.0f / 5040.0f);
  y = fma(y, r, broadcast(1.0f / 720.0f));
  y = fma(y, r, broadcast(1.0f / 120.0f));
  y = fma(y, r, broadcast(1.0f / 24.0f));
  y = fma(y, r, broadcast(1.0f / 6.0f));
  y = fma(y, r, broadcast(0.5f));
  y = fma(y, r, broadcast(1.0f));
  y = fma(y, r, broadcast(1.0f));
  y = mul(y, exp2_whole(n));
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLE_UQ), y);
#elif defined(__AVX2__)
  return _mm256_and_ps(y, _mm256_cmp_ps(x, lowest, _CMP_NLE_UQ));
#else
  return x <= lowest ? zero() : y;
#endif
}

}  // namespace octavo
