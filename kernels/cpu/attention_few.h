// A few query rows, as in decoding, against keys and values where they lie: packing them would cost more than it saves.
//
// The same softmax as in attention_tile.h, and the same results but for the order of the sums.
#pragma once

#include "attention_tile.h"

namespace pagedd::cpu {

#if !PAGEDD_AVX512
inline void store_all(Vec a, Vec b, Vec c, Vec d, float (&to)[4][kLanes]) {
  a.store(to[0]);
  b.store(to[1]);
  c.store(to[2]);
  d.store(to[3]);
}
#endif

// Each four lanes of the result: the sums of the same four lanes of a, b, c and d.
inline Vec sum_quarters(Vec a, Vec b, Vec c, Vec d) {
#if PAGEDD_AVX512
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  return {_mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))};
#else
  float x[4][kLanes], result[kLanes];
  store_all(a, b, c, d, x);
  for (int i = 0; i < kLanes; ++i) {
    const float* lanes = x[i % 4] + i / 4 * 4;
    result[i] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
  return Vec::load(result);
#endif
}

// Four lanes each: a summed over its quarters, then b, c and d.
inline Vec join_quarters(Vec a, Vec b, Vec c, Vec d) {
#if PAGEDD_AVX512
  const auto halves = [](__m512 p, __m512 q) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x88), _mm512_shuffle_f32x4(p, q, 0xdd));
  };
  return {halves(halves(a.v, b.v), halves(c.v, d.v))};
#else
  float x[4][kLanes], result[kLanes];
  store_all(a, b, c, d, x);
  for (int i = 0; i < kLanes; ++i) {
    const float* lanes = x[i / 4] + i % 4;
    result[i] = (lanes[0] + lanes[4]) + (lanes[8] + lanes[12]);
  }
  return Vec::load(result);
#endif
}

// scores[r][k] = query[r] · keys[k] for 16 keys; scores are kTileKeys apart.
template <class Rows, int kRows>
void multiply_sixteen(const float* query, RowPointer keys, RowPointer ahead, int head_dim, float* scores) {
  using Math = typename Rows::Math;
  const int num_words = head_dim / Math::kValuesPerWord;
  const int64_t row_bytes = value_bytes(Rows::kType, head_dim);
  fetch_scales<Rows>(ahead, head_dim);
  Vec quarters[kRows][4];
  for (int four = 0; four < 4; ++four) {
    Vec sum[kRows][4];
    for (int r = 0; r < kRows; ++r)
      for (int k = 0; k < 4; ++k) sum[r][k] = Vec::zero();
    const auto add = [&](int w, int count) {
      Vec word[kRows];
      for (int r = 0; r < kRows; ++r) word[r] = Math::load_words(query + r * num_words + w, count);
      for (int k = 0; k < 4; ++k) {
        const int index = four * 4 + k;
        const Vec key = Rows::load(row_after(Rows::kType, keys, index, head_dim), w, count);
        __builtin_prefetch(ahead.values + index * row_bytes + value_bytes(Rows::kType, w * Math::kValuesPerWord));
        for (int r = 0; r < kRows; ++r) sum[r][k] = Math::multiply_add(word[r], key, sum[r][k]);
      }
    };
    int w = 0;
    for (; w + kLanes <= num_words; w += kLanes) add(w, kLanes);
    if (w < num_words) add(w, kLanes / 2);
    for (int r = 0; r < kRows; ++r) quarters[r][four] = sum_quarters(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
  for (int r = 0; r < kRows; ++r) {
    Vec score = join_quarters(quarters[r][0], quarters[r][1], quarters[r][2], quarters[r][3]);
    if constexpr (Rows::kIsScaled) score = score * Rows::scales(keys.scales);
    score.store(scores + r * kTileKeys);
  }
}

// weighted[r] += Σ_k weights[r][k] · values[k] for 16 keys, and kVecs × 16 dimensions from d on.
template <class Rows, int kRows, int kVecs>
void add_sixteen(const float* weights, RowPointer values, RowPointer ahead, int head_dim, int d, float* weighted) {
  using Math = typename Rows::Math;
  constexpr int kStep = Math::kValuesPerWord;
  const int64_t row_bytes = value_bytes(Rows::kType, head_dim);
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) sum[r][j] = Vec::load(weighted + r * head_dim + d + j * kLanes);
  for (int k = 0; k < kLanes; k += kStep) {
    Vec value[kVecs];
    load_values<Rows, kVecs>(row_after(Rows::kType, values, k, head_dim), head_dim, d, value);
    for (int i = 0; i < kStep; ++i)
      for (int j = 0; j < kVecs; j += kStep)
        __builtin_prefetch(ahead.values + (k + i) * row_bytes + value_bytes(Rows::kType, d + j * kLanes));
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Vec::all(weights[r * kTileKeys + k / kStep]);
      for (int j = 0; j < kVecs; ++j) sum[r][j] = Math::multiply_add(weight, value[j], sum[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) sum[r][j].store(weighted + r * head_dim + d + j * kLanes);
}

template <class Rows, int kRows>
void add_sixteen(const float* weights, RowPointer values, RowPointer ahead, int head_dim, float* weighted) {
  fetch_scales<Rows>(ahead, head_dim);
  int d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
    add_sixteen<Rows, kRows, 4>(weights, values, ahead, head_dim, d, weighted);
  if (d + 2 * kLanes <= head_dim) {
    add_sixteen<Rows, kRows, 2>(weights, values, ahead, head_dim, d, weighted);
    d += 2 * kLanes;
  }
  if (d < head_dim) add_sixteen<Rows, kRows, 1>(weights, values, ahead, head_dim, d, weighted);
}

}  // namespace pagedd::cpu
