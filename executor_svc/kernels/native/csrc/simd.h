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
// y times 2 to the power of the whole number x, -126 to 127.
static inline Vec times_exp2(Vec y, Vec x) { return _mm512_scalef_ps(y, x); }
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
static inline Vec times_exp2(Vec y, Vec x) {
  const Bits exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
  return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
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
static inline Vec times_exp2(Vec y, Vec x) {
  const Bits exponent = reinterpret_cast<Bits>(__builtin_convertvector(x, Whole) + 127) << 23;
  return y * reinterpret_cast<Vec>(exponent);
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

// As to_bf16 rounds, in the upper half of each lane; what is left in the lower half means nothing.
static inline Bits rounded_up_halves(Vec x) {
#if defined(__AVX512F__)
  const Bits bits = _mm512_castps_si512(x);
  const Bits odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const Bits rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const Bits quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
#elif defined(__AVX2__)
  const Bits bits = _mm256_castps_si256(x);
  const Bits odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const Bits rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const Bits quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
#else
  const Bits bits = reinterpret_cast<Bits>(x);
  const Bits rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
  return x == x ? rounded : bits | 0x400000u;
#endif
}
#if defined(__AVX512F__)
// The same, without space between.
static inline __m256i rounded_halves(Vec x) {
#if defined(__AVX512BF16__)
  // One instruction, but what is too small for a normal float32 it takes for zero.
  constexpr int kTooSmall = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(x, kTooSmall) == 0, 1))
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#endif
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_up_halves(x), 16));
}
#endif
static inline void store(bf16* p, Vec x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded_halves(x));
#elif defined(__AVX2__)
  const __m256i low = _mm256_srli_epi32(rounded_up_halves(x), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
#else
  const Bits halves = rounded_up_halves(x);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<bf16>(halves[i] >> 16);
#endif
}
// What store and load of bfloat16 make of it.
static inline Vec rounded_to_bf16(Vec x) {
#if defined(__AVX512BF16__)
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded_halves(x)), 16));
#else
  return high_halves(rounded_up_halves(x));
#endif
}
// The lanes of two vectors in turn: what low_halves and high_halves of the 2 * kLanes bfloat16 from p on give back.
static inline void store_halves(bf16* p, Vec low, Vec high) {
  const Bits a = rounded_up_halves(low), b = rounded_up_halves(high);
#if defined(__AVX512F__)
  const Bits both = _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_and_si512(b, broadcast_bits(0xffff0000u)));
  _mm512_storeu_si512(p, both);
#elif defined(__AVX2__)
  const Bits both = _mm256_or_si256(_mm256_srli_epi32(a, 16), _mm256_and_si256(b, broadcast_bits(0xffff0000u)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
#else
  const Bits both = (a >> 16) | (b & 0xffff0000u);
  std::memcpy(p, &both, sizeof both);
#endif
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
static inline Vec absolute(Vec x) { return max(sub(zero(), x), x); }

constexpr float kLowestExp = -87.33654f;

// exp(x) where x = n * log(2) + r, n a whole number and |r| <= log(2) / 2; 0 for x below -87.3, minus infinity included,
// where the exact value is below the smallest normal float32, and NaN for NaN. exp(r) is its Taylor polynomial of degree
// 7, whose rest is below 2^-27 there.
static inline Vec exp_by_parts(Vec x, Vec n, Vec r) {
  Vec y = broadcast(1.0f / 5040.0f);
  y = fma(y, r, broadcast(1.0f / 720.0f));
  y = fma(y, r, broadcast(1.0f / 120.0f));
  y = fma(y, r, broadcast(1.0f / 24.0f));
  y = fma(y, r, broadcast(1.0f / 6.0f));
  y = fma(y, r, broadcast(0.5f));
  y = fma(y, r, broadcast(1.0f));
  y = fma(y, r, broadcast(1.0f));
  y = times_exp2(y, n);
  const Vec lowest = broadcast(kLowestExp);
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLE_UQ), y);
#elif defined(__AVX2__)
  return _mm256_and_ps(y, _mm256_cmp_ps(x, lowest, _CMP_NLE_UQ));
#else
  return x <= lowest ? zero() : y;
#endif
}

// The n of the x that exp can take, as its neighbour for those that it cannot.
static inline Vec exp_whole_part(Vec clamped) { return round_even(mul(clamped, broadcast(1.44269504f))); }
static inline Vec clamp_exp(Vec x) { return min(broadcast(88.3f), max(broadcast(kLowestExp), x)); }

// exp(x) for x up to 88, within 2 units in the last place; see exp_by_parts. log(2) is subtracted in two parts (Cody and
// Waite 1980) so that r is exact.
static inline Vec exp(Vec x) {
  const Vec clamped = clamp_exp(x), n = exp_whole_part(clamped);
  return exp_by_parts(x, n, fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), clamped)));
}

}  // namespace octavo
