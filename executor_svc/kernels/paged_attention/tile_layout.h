// Keys, values and queries brought into the order in which tiles multiply: see tiles.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "../native/csrc/simd.h"

namespace octavo {
namespace attention {

// A tile is 16 lines of 64 bytes: of bfloat16 32 elements deep, in pairs where it is the right factor; of float32 16.
constexpr int kTile = 16;
constexpr int kDepth = 32;
constexpr int kTileWords = kTile * kTile;

#if defined(__AVX512F__)

// Word w of 16 lines, for the four w from `word` on: to[w * stride], 16 words in the lines' order.
inline void turn_four(const void* const* lines, int64_t word, void* to, int64_t stride) {
  const auto quarter = [&](int line) {
    return _mm_loadu_ps(static_cast<const float*>(lines[line]) + word);
  };
  const auto every_fourth = [&](int line) {
    __m512 x = _mm512_castps128_ps512(quarter(line));
    x = _mm512_mask_broadcast_f32x4(x, 0x00f0, quarter(line + 4));
    x = _mm512_mask_broadcast_f32x4(x, 0x0f00, quarter(line + 8));
    return _mm512_castps_pd(_mm512_mask_broadcast_f32x4(x, 0xf000, quarter(line + 12)));
  };
  const __m512 a = _mm512_castpd_ps(every_fourth(0)), b = _mm512_castpd_ps(every_fourth(1));
  const __m512 c = _mm512_castpd_ps(every_fourth(2)), d = _mm512_castpd_ps(every_fourth(3));
  const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
  const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  float* const out = static_cast<float*>(to);
  _mm512_storeu_pd(out, _mm512_unpacklo_pd(ab, cd));
  _mm512_storeu_pd(out + stride, _mm512_unpackhi_pd(ab, cd));
  _mm512_storeu_pd(out + 2 * stride, _mm512_unpacklo_pd(ab_high, cd_high));
  _mm512_storeu_pd(out + 3 * stride, _mm512_unpackhi_pd(ab_high, cd_high));
}

#else

inline void turn_four(const void* const* lines, int64_t word, void* to, int64_t stride) {
  for (int64_t w = 0; w < 4; ++w)
    for (int line = 0; line < kTile; ++line)
      std::memcpy(static_cast<float*>(to) + w * stride + line, static_cast<const float*>(lines[line]) + word + w, 4);
}

#endif

#if defined(__AVX512BW__)
// The first `count` elements of a depth.
inline __mmask32 first_of_depth(int64_t count) {
  return count >= kDepth ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}
#endif

// Elements [column, column + kDepth) of a head, zeros from head_dim on.
inline void copy_part(const bf16* head, int64_t column, int64_t head_dim, bf16* to) {
  const int64_t left = head_dim - column;
#if defined(__AVX512BW__)
  _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(first_of_depth(left), head + column));
#else
  const int64_t count = left < kDepth ? left : kDepth;
  std::memcpy(to, head + column, static_cast<size_t>(count) * sizeof(bf16));
  std::memset(to + count, 0, static_cast<size_t>(kDepth - count) * sizeof(bf16));
#endif
}

// Whether some element is infinite or NaN: times a weight of zero it is not zero.
inline bool any_not_finite(const bf16* head, int64_t head_dim) {
  constexpr bf16 kExponent = 0x7f80;
#if defined(__AVX512BW__)
  const __m512i exponent = _mm512_set1_epi16(kExponent);
  __mmask32 among = 0;
  for (int64_t i = 0; i < head_dim; i += kDepth) {
    const __m512i values = _mm512_maskz_loadu_epi16(first_of_depth(head_dim - i), head + i);
    among |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(values, exponent), exponent);
  }
  return among != 0;
#else
  // To the end, without a branch: so the compiler takes vectors.
  bf16 found = 0;
  for (int64_t i = 0; i < head_dim; ++i) found |= (head[i] & kExponent) == kExponent;
  return found != 0;
#endif
}

}  // namespace attention
}  // namespace octavo
