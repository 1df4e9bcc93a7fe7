// The forms of a KV cache, and the arithmetic that each is attended in.
//
// Products run over *words* of 32 bits, kept in float arrays: one float32, or two neighbouring bfloat16. A `Math` says
// what a product of words is and makes words of floats; a `Rows` loads a cached row of one head as its Math's words. A
// new form of the cache is one more Rows.
#pragma once

#include <type_traits>

#include "vector_math.h"

#if PAGEDD_AVX512 && defined(__AVX512BF16__)
#define PAGEDD_BFLOAT16_DOT 1
#endif

namespace pagedd::cpu {

struct Float32Math {
  static constexpr int kValuesPerWord = 1;

  static Vec multiply_add(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }

  // [size] floats → words; size is a multiple of 16.
  static void make_words(const float* x, int size, float* words) { std::memcpy(words, x, size * sizeof(float)); }

  static Vec load_words(const float* words, int) { return Vec::load(words); }

  // 16 values each of kVecs vectors → words.
  template <int kVecs>
  static void store_words(const Vec* x, float* words) {
    for (int i = 0; i < kVecs; ++i) x[i].store(words + i * kLanes);
  }
};

// Words [first, first + count) of a row, 16 at most; what lies past `count` is zero or unread.
struct Float32Rows {
  using Math = Float32Math;
  using Element = float;

  static Vec load(const Element* row, int first, int) { return Vec::load(row + first); }
};

#if PAGEDD_BFLOAT16_DOT

struct BFloat16Math {
  static constexpr int kValuesPerWord = 2;

  static Vec multiply_add(Vec a, Vec b, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
  }

  static void make_words(const float* x, int size, float* words) {
    for (int i = 0; i < size; i += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i / 2),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i))));
  }

  static Vec load_words(const float* words, int count) {
    return {_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), words)};
  }

  template <int kVecs>
  static void store_words(const Vec* x, float* words) {
    for (int i = 0; i < kVecs; i += 2) {
      const __m512 second = i + 1 < kVecs ? x[i + 1].v : _mm512_setzero_ps();
      _mm512_storeu_ps(words + i / 2 * kLanes, reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(second, x[i].v)));
    }
  }
};

struct BFloat16Rows {
  using Math = BFloat16Math;
  using Element = uint16_t;

  static Vec load(const Element* row, int first, int count) {
    return {_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), reinterpret_cast<const float*>(row) + first)};
  }
};

#else

struct BFloat16Rows {
  using Math = Float32Math;
  using Element = uint16_t;

  static Vec load(const Element* row, int first, int) {
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = from_bfloat16(row[first + i]);
    return Vec::load(x);
  }
};

#endif

// word i of vector j ↔ word j of vector i
inline void transpose(Vec (&x)[kLanes]) {
#if PAGEDD_AVX512
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  const auto low = [](__m512 p, __m512 q) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(p), _mm512_castps_pd(q)));
  };
  const auto high = [](__m512 p, __m512 q) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(p), _mm512_castps_pd(q)));
  };
  for (int i = 0; i < 16; i += 4) {  // b[i + j]: words j, j + 4, j + 8, j + 12 of rows i … i + 3
    b[i] = low(a[i], a[i + 2]);
    b[i + 1] = high(a[i], a[i + 2]);
    b[i + 2] = low(a[i + 1], a[i + 3]);
    b[i + 3] = high(a[i + 1], a[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 p = _mm512_shuffle_f32x4(b[j], b[j + 4], 0x88), q = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0x88);
    const __m512 r = _mm512_shuffle_f32x4(b[j], b[j + 4], 0xdd), s = _mm512_shuffle_f32x4(b[j + 8], b[j + 12], 0xdd);
    x[j].v = _mm512_shuffle_f32x4(p, q, 0x88);
    x[j + 4].v = _mm512_shuffle_f32x4(r, s, 0x88);
    x[j + 8].v = _mm512_shuffle_f32x4(p, q, 0xdd);
    x[j + 12].v = _mm512_shuffle_f32x4(r, s, 0xdd);
  }
#else
  float rows[kLanes][kLanes], columns[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) x[i].store(rows[i]);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) columns[i][j] = rows[j][i];
  for (int i = 0; i < kLanes; ++i) x[i] = Vec::load(columns[i]);
#endif
}

// Packing takes 16 rows at a time, head_dim elements apart. The 16 at `ahead` are fetched meanwhile, a line for each
// that is loaded: prefetches in a burst are dropped. Decoding waits for little but these rows.

// Keys as columns: words[w × stride + k] is word w of row k.
template <class Rows>
void pack_keys(const typename Rows::Element* rows, const typename Rows::Element* ahead, int head_dim, int stride,
               float* words) {
  const int num_words = head_dim / Rows::Math::kValuesPerWord;
  Vec x[kLanes];
  int first = 0;
  for (; first + kLanes <= num_words; first += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      x[k] = Rows::load(rows + k * head_dim, first, kLanes);
      __builtin_prefetch(ahead + k * head_dim + first * Rows::Math::kValuesPerWord);
    }
    transpose(x);
    for (int i = 0; i < kLanes; ++i) x[i].store(words + (first + i) * stride);
  }
  if (first < num_words) {  // two values a word and an odd number of 16s
    for (int k = 0; k < kLanes; ++k) x[k] = Rows::load(rows + k * head_dim, first, kLanes / 2);
    transpose(x);
    for (int i = 0; i < kLanes / 2; ++i) x[i].store(words + (first + i) * stride);
  }
}

// Values as words along the keys: dimensions [d, d + kVecs × 16) of the kValuesPerWord rows at `rows`.
template <class Rows, int kVecs>
void load_values(const typename Rows::Element* rows, [[maybe_unused]] int head_dim, int d, Vec* words) {
  if constexpr (Rows::Math::kValuesPerWord == 1) {
    for (int j = 0; j < kVecs; ++j) words[j] = Rows::load(rows, d + j * kLanes, kLanes);
  } else {
#if PAGEDD_BFLOAT16_DOT
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int j = 0; j < kVecs; j += 2) {
      const int count = j + 1 < kVecs ? kLanes : kLanes / 2;
      const __m512i a = _mm512_castps_si512(Rows::load(rows, d / 2 + j * kLanes / 2, count).v);
      const __m512i b = _mm512_castps_si512(Rows::load(rows + head_dim, d / 2 + j * kLanes / 2, count).v);
      words[j].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
      if (j + 1 < kVecs) words[j + 1].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
    }
#endif
  }
}

// The values of 16 rows: words[p × head_dim + d] is dimension d of rows p × kValuesPerWord and following.
template <class Rows>
void pack_values(const typename Rows::Element* rows, const typename Rows::Element* ahead, int head_dim, float* words) {
  constexpr int kStep = Rows::Math::kValuesPerWord;
  const auto pack_columns = [&]<int kVecs>(std::integral_constant<int, kVecs>, int d) {
    for (int k = 0; k < kLanes; k += kStep) {
      Vec value[kVecs];
      load_values<Rows, kVecs>(rows + k * head_dim, head_dim, d, value);
      for (int i = 0; i < kStep; ++i) __builtin_prefetch(ahead + (k + i) * head_dim + d);
      for (int j = 0; j < kVecs; ++j) value[j].store(words + k / kStep * head_dim + d + j * kLanes);
    }
  };
  int d = 0;
  for (; d + kStep * kLanes <= head_dim; d += kStep * kLanes) pack_columns(std::integral_constant<int, kStep>(), d);
  if (d < head_dim) pack_columns(std::integral_constant<int, 1>(), d);
}

}  // namespace pagedd::cpu
