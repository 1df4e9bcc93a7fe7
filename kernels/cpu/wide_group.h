// The weights of two tiles for a wide group of inputs, in 8 bits under one scale and offset an output.
//
// Owns their requantization from groups of 32, which a product of many rows makes on the fly and spreads over its rows:
//
//   offset = the least weight that the groups can hold     scale = (the largest − offset) / kWideLevels
//   weight = scale_g · q + offset_g ≈ scale · q' + offset  q' = (q · factor_g + start_g) >> 8, in 16 bits
//   factor_g = 256 · scale_g / scale                       start_g = 256 · (offset_g − offset) / scale + a half
//
// factor_g and start_g are rounded too, so a weight of 4 bits is within 0.54 of a scale, one of 8 bits within a whole one.
#pragma once

#include <cmath>

#include "linear.h"
#include "register_block.h"
#include "vector_math.h"
#include "weight_tiles.h"

#if PAGEDD_VNNI

namespace pagedd::cpu {

constexpr int kWideLevels = 254;  // not 255: what rounding the factor adds must not carry out of the 16 bits

struct alignas(64) WideGroup {
  uint8_t q[kWideGroup / 4][kTilesAtOnce][kTile][4];
  float scale[kTilesAtOnce][kTile], offset[kTilesAtOnce][kTile];
};

// A 32-bit lane's number in both of its 16-bit halves.
inline __m512i in_both_halves(__m512i numbers) {
  return _mm512_or_si512(_mm512_slli_epi32(numbers, 16), _mm512_and_si512(numbers, _mm512_set1_epi32(0xffff)));
}

// Fills tile `t` of `wide` from `count` groups of 32.
template <class Group>
inline void widen(const Group* groups, int count, int t, WideGroup& wide) {
  Vec least = Vec::all(INFINITY), largest = Vec::all(-INFINITY);
  for (int g = 0; g < count; ++g) {
    const Vec start = Vec::load_half(groups[g].offset);
    const Vec end = fma(Vec::load_half(groups[g].scale), Vec::all(Group::kLevels), start);  // a scale may be negative
    least = min(least, min(start, end));
    largest = max(largest, max(start, end));
  }
  const Vec scale = (largest - least) * Vec::all(1.0f / kWideLevels);
  scale.store(wide.scale[t]);
  least.store(wide.offset[t]);
  // Where all weights are equal, q' is 0.
  const Vec inverse = {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(scale.v, Vec::zero().v, _CMP_GT_OQ),
                                           Vec::all(256.0f).v, scale.v)};
  const __m512i half = _mm512_set1_epi16(128), low_byte = _mm512_set1_epi16(0xff);
  for (int g = 0; g < count; ++g) {
    const Vec from_least = Vec::load_half(groups[g].offset) - least;
    const __m512i factor = in_both_halves(_mm512_cvtps_epi32((Vec::load_half(groups[g].scale) * inverse).v));
    const __m512i start = _mm512_add_epi16(in_both_halves(_mm512_cvtps_epi32((from_least * inverse).v)), half);
    const Group* const group[1] = {groups + g};
    for_each_quad(group, [&](int quad, const __m512i* values) {
      const auto widened = [&](__m512i q) { return _mm512_add_epi16(_mm512_mullo_epi16(q, factor), start); };
      const __m512i even = widened(_mm512_and_si512(values[0], low_byte));
      const __m512i odd = widened(_mm512_srli_epi16(values[0], 8));
      // Bits of `odd` in the upper bytes, of `even` in the lower ones.
      constexpr int kSelect = 0xd8;
      const __m512i both = _mm512_ternarylogic_epi32(odd, _mm512_srli_epi16(even, 8), low_byte, kSelect);
      _mm512_store_si512(wide.q[g * kQuads + quad][t], both);
    });
  }
}

}  // namespace pagedd::cpu

#endif
