// The forms of a KV cache, and the arithmetic that each is attended in.
//
// Products run over *words* of 32 bits, kept in float arrays: one float32, or two neighbouring bfloat16. A `Math` says
// what a product of words is and makes words of floats; a `Rows` loads a cached row of one head as its Math's words. A
// new form of the cache is one more Rows. Where bfloat16 can be multiplied, all forms but float32 are read as that.
//
// int8 and fp8 values are bfloat16 numbers as they are, so their rows are loaded without their scale (`kIsScaled`):
// a key's scale multiplies its scores and a value's scale its weights, once for a key instead of once for a number, and
// the cached numbers are not rounded again. int4 has scales and offsets inside a row and is loaded as what it stands for.
#pragma once

#include <type_traits>

#include "kv_form.h"
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

using NarrowMath = BFloat16Math;

#else

using NarrowMath = Float32Math;

#endif

inline uint16_t load_bits16(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

inline RowPointer row_after(KvType type, RowPointer first, int k, int head_dim) {
  return {first.values + k * value_bytes(type, head_dim), first.scales + k * scale_bytes(type, head_dim)};
}

// load: words [first, first + count) of a row, count being 16 or, where a word is two values, 8; the others are zero.
struct Float32Rows {
  using Math = Float32Math;
  static constexpr KvType kType = KvType::kFloat32;
  static constexpr bool kIsScaled = false;

  static Vec load(RowPointer row, int first, int) {
    return Vec::load(reinterpret_cast<const float*>(row.values) + first);
  }
};

struct BFloat16Rows {
  using Math = NarrowMath;
  static constexpr KvType kType = KvType::kBFloat16;
  static constexpr bool kIsScaled = false;

  static Vec load(RowPointer row, int first, [[maybe_unused]] int count) {
#if PAGEDD_BFLOAT16_DOT
    return Math::load_words(reinterpret_cast<const float*>(row.values) + first, count);
#else
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = from_bfloat16(load_bits16(row.values + 2 * (first + i)));
    return Vec::load(x);
#endif
  }
};

// The factors of 16 rows of a form whose rows have one each: a bfloat16, times what load() leaves out besides.
inline Vec load_scales(const uint8_t* scales, float left_out) {
  float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = from_bfloat16(load_bits16(scales + 2 * i)) * left_out;
  return Vec::load(x);
}

struct Int8Rows {
  using Math = NarrowMath;
  static constexpr KvType kType = KvType::kInt8;
  static constexpr bool kIsScaled = true;

  static Vec scales(const uint8_t* scales) { return load_scales(scales, 1.0f); }

  static Vec load(RowPointer row, int first, [[maybe_unused]] int count) {
#if PAGEDD_BFLOAT16_DOT
    const auto sixteen = [](const uint8_t* from) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    };
    const uint8_t* from = row.values + 2 * first;
    const __m512 second = count == kLanes ? sixteen(from + kLanes) : _mm512_setzero_ps();
    return {reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(second, sixteen(from)))};
#else
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) x[i] = float(int8_t(row.values[first + i]));
    return Vec::load(x);
#endif
  }
};

// e4m3 has the fields of float16, the exponent 8 less and three bits of the fraction.
struct Fp8Rows {
  using Math = NarrowMath;
  static constexpr KvType kType = KvType::kFp8;
  static constexpr bool kIsScaled = true;

  static Vec scales(const uint8_t* scales) { return load_scales(scales, 0x1p8f); }

  static Vec load(RowPointer row, int first, [[maybe_unused]] int count) {
#if PAGEDD_BFLOAT16_DOT
    const __m256i bytes = _mm256_maskz_loadu_epi8(__mmask32((uint64_t(1) << 2 * count) - 1), row.values + 2 * first);
    const __m512i half = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7),
                                          _mm512_set1_epi16(int16_t(0xbfff)));
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    return {reinterpret_cast<__m512>(_mm512_cvtne2ps_pbh(high, low))};
#else
    uint16_t half[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int byte = row.values[first + i];
      half[i] = uint16_t((byte & 0x80) << 8 | (byte & 0x7f) << 7);
    }
    return Vec::load_half(half);
#endif
  }
};

struct Int4Rows {
  using Math = NarrowMath;
  static constexpr KvType kType = KvType::kInt4;
  static constexpr bool kIsScaled = false;

  static Vec load(RowPointer row, int first, [[maybe_unused]] int count) {
    const uint8_t* group = row.scales + first * Math::kValuesPerWord / kInt4Group * 4;
    const float scale = from_bfloat16(load_bits16(group)), offset = from_bfloat16(load_bits16(group + 2));
#if PAGEDD_BFLOAT16_DOT
    // A group is one vector of words, and has 16 numbers to choose from.
    const __m512 steps = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 numbers = _mm512_fmadd_ps(steps, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
    const __m512i table = _mm512_castsi256_si512(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(numbers)));
    const __mmask16 mask = __mmask16((1u << count) - 1);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, row.values + first));
    const __m512i indices = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)),
                                             _mm512_set1_epi32(0x000f000f));
    const __m512i words = _mm512_permutexvar_epi16(indices, table);
    return {_mm512_castsi512_ps(_mm512_maskz_mov_epi32(mask, words))};
#else
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int nibble = row.values[(first + i) / 2] >> (first + i) % 2 * 4 & 15;
      x[i] = offset + float(nibble) * scale;
    }
    return Vec::load(x);
#endif
  }
};

// Four bits, and a scale and an offset a dimension: those of the rows' block.
struct Channel4Rows {
  using Math = NarrowMath;
  static constexpr KvType kType = KvType::kChannel4;
  static constexpr bool kIsScaled = false;

  static Vec load(RowPointer row, int first, [[maybe_unused]] int count) {
    const uint8_t* steps = row.scales + 4 * first * Math::kValuesPerWord;
#if PAGEDD_BFLOAT16_DOT
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512i low = _mm512_loadu_si512(steps);
    const __m512i high = count == kLanes ? _mm512_loadu_si512(steps + 64) : _mm512_setzero_si512();
    const auto numbers = [](__m512i q, __m512i step) {
      const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(step, 16));
      const __m512 offset = _mm512_castsi512_ps(_mm512_and_si512(step, _mm512_set1_epi32(int(0xffff0000))));
      const __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(q), scale, offset);
      return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
    };
    const __mmask16 mask = __mmask16((1u << count) - 1);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, row.values + first));
    const __m512i first_of_word = numbers(_mm512_and_si512(bytes, _mm512_set1_epi32(15)),
                                          _mm512_permutex2var_epi32(low, even, high));
    const __m512i second_of_word = numbers(_mm512_srli_epi32(bytes, 4), _mm512_permutex2var_epi32(low, odd, high));
    return {_mm512_castsi512_ps(_mm512_maskz_or_epi32(mask, first_of_word, _mm512_slli_epi32(second_of_word, 16)))};
#else
    float x[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int nibble = row.values[(first + i) / 2] >> (first + i) % 2 * 4 & 15;
      x[i] = from_bfloat16(load_bits16(steps + 4 * i + 2)) + float(nibble) * from_bfloat16(load_bits16(steps + 4 * i));
    }
    return Vec::load(x);
#endif
  }
};

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

// Packing takes 16 rows at a time. The 16 at `ahead` are fetched meanwhile, a line for each that is loaded: prefetches in
// a burst are dropped. Decoding waits for little but these rows.

template <class Rows>
void fetch_scales(RowPointer ahead, int head_dim) {
  for (int64_t byte = 0; byte < kLanes * scale_bytes(Rows::kType, head_dim); byte += 64)
    __builtin_prefetch(ahead.scales + byte);
}

// Keys as columns: words[w × stride + k] is word w of row k.
template <class Rows>
void pack_keys(RowPointer rows, RowPointer ahead, int head_dim, int stride, float* words) {
  const int64_t row_bytes = value_bytes(Rows::kType, head_dim);
  fetch_scales<Rows>(ahead, head_dim);
  const int num_words = head_dim / Rows::Math::kValuesPerWord;
  Vec x[kLanes];
  int first = 0;
  for (; first + kLanes <= num_words; first += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      x[k] = Rows::load(row_after(Rows::kType, rows, k, head_dim), first, kLanes);
      __builtin_prefetch(ahead.values + k * row_bytes + value_bytes(Rows::kType, first * Rows::Math::kValuesPerWord));
    }
    transpose(x);
    for (int i = 0; i < kLanes; ++i) x[i].store(words + (first + i) * stride);
  }
  if (first < num_words) {  // two values a word and an odd number of 16s
    for (int k = 0; k < kLanes; ++k)
      x[k] = Rows::load(row_after(Rows::kType, rows, k, head_dim), first, kLanes / 2);
    transpose(x);
    for (int i = 0; i < kLanes / 2; ++i) x[i].store(words + (first + i) * stride);
  }
}

// Values as words along the keys: dimensions [d, d + kVecs × 16) of the kValuesPerWord rows at `rows`.
template <class Rows, int kVecs>
void load_values(RowPointer rows, [[maybe_unused]] int head_dim, int d, Vec* words) {
  if constexpr (Rows::Math::kValuesPerWord == 1) {
    for (int j = 0; j < kVecs; ++j) words[j] = Rows::load(rows, d + j * kLanes, kLanes);
  } else {
#if PAGEDD_BFLOAT16_DOT
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const RowPointer second = row_after(Rows::kType, rows, 1, head_dim);
    for (int j = 0; j < kVecs; j += 2) {
      const int count = j + 1 < kVecs ? kLanes : kLanes / 2;
      const __m512i a = _mm512_castps_si512(Rows::load(rows, d / 2 + j * kLanes / 2, count).v);
      const __m512i b = _mm512_castps_si512(Rows::load(second, d / 2 + j * kLanes / 2, count).v);
      words[j].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, low, b));
      if (j + 1 < kVecs) words[j + 1].v = _mm512_castsi512_ps(_mm512_permutex2var_epi16(a, high, b));
    }
#endif
  }
}

// The values of 16 rows: words[p × head_dim + d] is dimension d of rows p × kValuesPerWord and following.
template <class Rows>
void pack_values(RowPointer rows, RowPointer ahead, int head_dim, float* words) {
  const int64_t row_bytes = value_bytes(Rows::kType, head_dim);
  fetch_scales<Rows>(ahead, head_dim);
  constexpr int kStep = Rows::Math::kValuesPerWord;
  const auto pack_columns = [&]<int kVecs>(std::integral_constant<int, kVecs>, int d) {
    for (int k = 0; k < kLanes; k += kStep) {
      Vec value[kVecs];
      load_values<Rows, kVecs>(row_after(Rows::kType, rows, k, head_dim), head_dim, d, value);
      for (int i = 0; i < kStep; ++i)
        __builtin_prefetch(ahead.values + (k + i) * row_bytes + value_bytes(Rows::kType, d));
      for (int j = 0; j < kVecs; ++j) value[j].store(words + k / kStep * head_dim + d + j * kLanes);
    }
  };
  int d = 0;
  for (; d + kStep * kLanes <= head_dim; d += kStep * kLanes) pack_columns(std::integral_constant<int, kStep>(), d);
  if (d < head_dim) pack_columns(std::integral_constant<int, 1>(), d);
}

}  // namespace pagedd::cpu
