// The weights of two tiles in 8 bits under one scale an output, so that a product of many rows is about nothing else.
//
// Owns their requantization from groups of 32, which such a product makes on the fly and spreads over its rows:
//
//   scale  = the largest magnitude that an output's groups can hold / kWideLevels
//   weight = scale_g · q + offset_g ≈ scale · (q' − kWideMiddle)
//   q'     = (q · factor_g + start_g) >> 8, in 16 bits
//   factor_g = 256 · scale_g / scale
//   start_g  = 256 · ((offset_g + m · scale_g) / scale + kWideMiddle) − m · factor_g + a half, m in the middle of q
//
// factor_g and start_g are rounded too, so a weight of 4 bits is within 0.54 of a scale, one of 8 bits within 0.76: most
// weights lie around m, where factor_g's rounding weighs least. Products in 16 bits may carry out on the way; sums do not.
#pragma once

#include "linear.h"
#include "register_block.h"
#include "vector_math.h"
#include "weight_tiles.h"
#include "wide_product.h"

#if PAGEDD_VNNI

namespace pagedd::cpu {

constexpr int kWideLevels = 126;  // not 127: what rounding the factor adds must not carry out of the 16 bits
constexpr int kWideRange = 192;   // inputs that share a scale
constexpr int kWideInputs = 768;  // whose weights stay in the first-level cache while rows go by

struct alignas(64) WideWeights {
  uint8_t q[kWideInputs / 4][kTilesAtOnce][kTile][4];
  float scale[kWideInputs / kWideRange][kTilesAtOnce][kTile];
};

// A 32-bit lane's number in both of its 16-bit halves.
inline __m512i in_both_halves(__m512i numbers) {
  return _mm512_or_si512(_mm512_slli_epi32(numbers, 16), _mm512_and_si512(numbers, _mm512_set1_epi32(0xffff)));
}

// Not a number where a group's scale or offset is none, or infinite: so are then the results.
template <class Group>
inline Vec wide_scale(const Group* groups, int count) {
  Vec largest = Vec::zero(), zeros = Vec::zero();
  for (int g = 0; g < count; ++g) {
    const Vec start = Vec::load_half(groups[g].offset);
    const Vec end = fma(Vec::load_half(groups[g].scale), Vec::all(Group::kLevels), start);
    largest = max(largest, max(abs(start), abs(end)));
    zeros = fma(end, Vec::zero(), zeros);  // a maximum may lose what is not a number, a sum does not
  }
  return fma(largest, Vec::all(1.0f / kWideLevels), zeros);
}

// Fills tile `t` of `wide` from `count` groups.
template <class Group>
inline void widen(const Group* groups, int count, int range, int t, WideWeights& wide) {
  const Vec scale = wide_scale(groups, count);
  scale.store(wide.scale[range][t]);
  // Where all weights are 0, so is what they become.
  const Vec inverse = {_mm512_maskz_div_ps(_mm512_cmp_ps_mask(scale.v, Vec::zero().v, _CMP_GT_OQ),
                                           Vec::all(256.0f).v, scale.v)};
  const __m512i start_of_zero = _mm512_set1_epi16(int16_t(256 * kWideMiddle + 128)), low_byte = _mm512_set1_epi16(0xff);
  constexpr int kMiddle = (Group::kLevels + 1) / 2;
  const auto in_256ths = [&](Vec weights) { return in_both_halves(_mm512_cvtps_epi32((weights * inverse).v)); };
  for (int g = 0; g < count; ++g) {
    const Vec group_scale = Vec::load_half(groups[g].scale);
    const __m512i factor = in_256ths(group_scale);
    const __m512i middle = in_256ths(fma(group_scale, Vec::all(kMiddle), Vec::load_half(groups[g].offset)));
    const __m512i from_middle = _mm512_mullo_epi16(factor, _mm512_set1_epi16(kMiddle));
    const __m512i start = _mm512_add_epi16(_mm512_sub_epi16(middle, from_middle), start_of_zero);
    const Group* const group[1] = {groups + g};
    for_each_quad(group, [&](int quad, const __m512i* values) {
      const auto widened = [&](__m512i q) { return _mm512_add_epi16(_mm512_mullo_epi16(q, factor), start); };
      const __m512i even = widened(_mm512_and_si512(values[0], low_byte));
      const __m512i odd = widened(_mm512_srli_epi16(values[0], 8));
      // Bits of `odd` in the upper bytes, of `even` in the lower ones.
      constexpr int kSelect = 0xd8;
      const __m512i both = _mm512_ternarylogic_epi32(odd, _mm512_srli_epi16(even, 8), low_byte, kSelect);
      _mm512_store_si512(wide.q[(range * kWideRange / kGroup + g) * kQuads + quad][t], both);
    });
  }
}

}  // namespace pagedd::cpu

#endif
