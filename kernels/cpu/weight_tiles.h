// How the quantized forms lie in a tile (see linear.h): a group of 32 inputs for all 16 outputs.
#pragma once

#include <cstdint>

#include "linear.h"
#include "vector_math.h"

#if PAGEDD_AVX512 && defined(__AVX512VNNI__)
#define PAGEDD_VNNI 1
#endif

namespace pagedd::cpu {

constexpr int kQuads = kGroup / 4;  // dpbusd takes four inputs at a time

struct Int8Group {
  static constexpr int kLevels = 255;  // the largest q
  uint8_t q[kQuads][kTile][4];
  uint16_t scale[kTile], offset[kTile];
};
struct Int4Group {
  static constexpr int kLevels = 15;
  uint8_t q[kQuads / 2][kTile][4];  // low nibble: quad i, high nibble: quad i + 4
  uint16_t scale[kTile], offset[kTile];
};

#if PAGEDD_VNNI
// Calls use(quad, values) for the 8 quads of a group in all tiles, values[t] being unsigned bytes.
template <int tiles, class Use>
inline void for_each_quad(const Int8Group* const (&group)[tiles], Use use) {
#pragma GCC unroll 8
  for (int quad = 0; quad < kQuads; ++quad) {
    __m512i values[tiles];
    for (int t = 0; t < tiles; ++t) values[t] = _mm512_loadu_si512(group[t]->q[quad]);
    use(quad, values);
  }
}

template <int tiles, class Use>
inline void for_each_quad(const Int4Group* const (&group)[tiles], Use use) {
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int quad = 0; quad < kQuads / 2; ++quad) {
    __m512i low[tiles], high[tiles];
    for (int t = 0; t < tiles; ++t) {
      const __m512i both = _mm512_loadu_si512(group[t]->q[quad]);
      low[t] = _mm512_and_si512(both, nibble);
      high[t] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    use(quad, low);
    use(quad + kQuads / 2, high);
  }
}
#endif

}  // namespace pagedd::cpu
