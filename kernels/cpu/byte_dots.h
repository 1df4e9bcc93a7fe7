// Sums of products of a quantized group, where the processor has no 512-bit dpbusd.
//
// With AVX2 eight outputs are a register. Nibbles times signed bytes fit 16 bits over a whole group: 32 · 15 · 127 / 2 a
// lane. Weights of 8 bits are taken as two nibbles, since maddubs saturates above. AVX-VNNI needs neither.
#pragma once

#include <cstring>

#include "vector_math.h"
#include "weight_tiles.h"

namespace pagedd::cpu {

#if PAGEDD_AVX2

inline __m256i four_everywhere(const int8_t* x) {
  int four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

inline __m256i eight_outputs(const uint8_t (&quad)[kTile][4], int half) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quad[half * kTile / 2]));
}

inline __m256i low_nibbles(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline __m256i high_nibbles(__m256i bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }

// Σ nibble · x for 8 outputs.
struct NibbleDots {
#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
  __m256i sums = _mm256_setzero_si256();
#if defined(__AVXVNNI__)
  void add(__m256i weights, __m256i x) { sums = _mm256_dpbusd_avx_epi32(sums, weights, x); }
#else
  void add(__m256i weights, __m256i x) { sums = _mm256_dpbusd_epi32(sums, weights, x); }
#endif
  __m256i total() const { return sums; }
#else
  __m256i sums = _mm256_setzero_si256();  // 16 bits each, two an output
  void add(__m256i weights, __m256i x) { sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x)); }
  __m256i total() const { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
#endif
};

template <int rows>
inline void add_group(const Int4Group& group, int half, const int8_t* const (&x)[rows], __m256i (&totals)[rows]) {
  NibbleDots dots[rows];
#pragma GCC unroll 4
  for (int quad = 0; quad < kQuads / 2; ++quad) {
    const __m256i both = eight_outputs(group.q[quad], half), low = low_nibbles(both), high = high_nibbles(both);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      dots[r].add(low, four_everywhere(x[r] + quad * 4));
      dots[r].add(high, four_everywhere(x[r] + (quad + kQuads / 2) * 4));
    }
  }
  for (int r = 0; r < rows; ++r) totals[r] = dots[r].total();
}

template <int rows>
inline void add_group(const Int8Group& group, int half, const int8_t* const (&x)[rows], __m256i (&totals)[rows]) {
  NibbleDots low[rows], high[rows];
#pragma GCC unroll 8
  for (int quad = 0; quad < kQuads; ++quad) {
    const __m256i bytes = eight_outputs(group.q[quad], half);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      const __m256i four = four_everywhere(x[r] + quad * 4);
#if defined(__AVXVNNI__)
      low[r].add(bytes, four);
#else
      low[r].add(low_nibbles(bytes), four);
      high[r].add(high_nibbles(bytes), four);
#endif
    }
  }
  for (int r = 0; r < rows; ++r)
    totals[r] = _mm256_add_epi32(low[r].total(), _mm256_slli_epi32(high[r].total(), 4));
}

// dots[r][t] = Σ q · x over the group, for 16 outputs of each tile.
template <class Group, int rows, int tiles>
inline void dots_of_group(const Group* const (&group)[tiles], const int8_t* const (&x)[rows], Vec (&dots)[rows][tiles]) {
  for (int t = 0; t < tiles; ++t)
    for (int half = 0; half < 2; ++half) {
      __m256i totals[rows];
      add_group(*group[t], half, x, totals);
      for (int r = 0; r < rows; ++r) {
        const __m256 floats = _mm256_cvtepi32_ps(totals[r]);
#if PAGEDD_AVX512
        dots[r][t].v = half ? _mm512_insertf32x8(dots[r][t].v, floats, 1) : _mm512_castps256_ps512(floats);
#else
        dots[r][t].part[half] = floats;
#endif
      }
    }
}

#else

inline int value_at(const Int8Group& group, int k, int output) { return group.q[k / 4][output][k % 4]; }
inline int value_at(const Int4Group& group, int k, int output) {
  const uint8_t both = group.q[k % (kGroup / 2) / 4][output][k % 4];
  return k < kGroup / 2 ? both & 15 : both >> 4;
}

template <class Group, int rows, int tiles>
inline void dots_of_group(const Group* const (&group)[tiles], const int8_t* const (&x)[rows], Vec (&dots)[rows][tiles]) {
  for (int t = 0; t < tiles; ++t) {
    int sums[rows][kTile] = {};
    for (int k = 0; k < kGroup; ++k) {
      int column[kTile];
      for (int output = 0; output < kTile; ++output) column[output] = value_at(*group[t], k, output);
      for (int r = 0; r < rows; ++r)
        for (int output = 0; output < kTile; ++output) sums[r][output] += column[output] * x[r][k];
    }
    for (int r = 0; r < rows; ++r) {
      float lanes[kTile];
      for (int output = 0; output < kTile; ++output) lanes[output] = float(sums[r][output]);
      dots[r][t] = Vec::load(lanes);
    }
  }
}

#endif

}  // namespace pagedd::cpu
