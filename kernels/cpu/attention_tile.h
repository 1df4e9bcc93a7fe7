// Some query rows against one tile of keys, as far as possible in registers: scores, online softmax, weighted values.
//
// The softmax runs in powers of two: a row's weights are 2^(score − reference), where the reference is raised, and what
// was summed so far scaled down, only when a score exceeds it by more than kHeadroom (Milakov and Gimelshein 2018; the
// headroom is FlashAttention-4's). Knows nothing of blocks or sequences; attention.cpp walks them.
#pragma once

#include "kv_rows.h"

namespace pagedd::cpu {

constexpr int kTileKeys = 64;  // keys whose words are packed at a time: 8 KB each of keys and values at head_dim 64
constexpr int kTileVecs = kTileKeys / kLanes;
#if PAGEDD_AVX512
constexpr int kMaxRowsAtOnce = 6;  // × kTileVecs sums, and their operands, fill the 32 registers
#else
constexpr int kMaxRowsAtOnce = 4;
#endif
constexpr float kHeadroom = 8.0f;
// Both far below any score; masked ones lie below the reference that nothing was seen under.
constexpr float kMasked = -1e30f;
constexpr float kNothingSeen = -1e25f;

// Rows of one item: query rows times the heads that share the KV head, heads fastest.
struct QueryRows {
  float* query;     // [num_rows, num_words] words
  float* weighted;  // [num_rows, head_dim], sum of weight × value
  float* sums;      // [num_rows, 16], sums of weights
  float* maxima;    // [num_rows], the reference
  int num_words, head_dim;
  int group_size, first_position;

  int position(int row) const { return first_position + row / group_size; }
};

struct KeyTile {
  const float* keys;    // [num_words, kTileKeys]
  const float* values;  // [kTileKeys / kValuesPerWord, head_dim]
  int first_key, end_key;
};

// Scores in powers of two: factor · s, or factor · tanh(cap_factor · s).
struct Scoring {
  float factor;
  float cap_factor;  // 0: no cap
  int sliding_window;
};

// 2^x, relative error below 2e-7 (minimax polynomial of degree 5 on [−½, ½]); 0 far below.
inline Vec exp2(Vec x) {
#if !PAGEDD_AVX512
  x = max(x, Vec::all(-200.0f));
#endif
  const Vec n = round(x), r = x - n;
  Vec p = fma(Vec::all(0.001327647129073739f), r, Vec::all(0.009675540961325169f));
  for (float c : {0.05550713092088699f, 0.24022120237350464f, 0.6931469440460205f, 1.0000001192092896f})
    p = fma(p, r, Vec::all(c));
#if PAGEDD_AVX512
  return scale_by_power_of_two(p, n);
#else
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &p.v[i], 4);
    bits += uint32_t(int32_t(n.v[i])) << 23;
    std::memcpy(&p.v[i], &bits, 4);
    p.v[i] = n.v[i] < -125.0f ? 0.0f : p.v[i];
  }
  return p;
#endif
}

// Relative error below 1e-6: an odd polynomial near zero (Cephes, S. Moshier), where 1 − 2 / (e^2x + 1) cancels.
inline Vec tanh(Vec x) {
  const Vec square = x * x;
  Vec p = Vec::all(-5.70498872745e-3f);
  for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
    p = fma(p, square, Vec::all(c));
  const Vec near = fma(x * square, p, x);
  const Vec far = Vec::all(1.0f) - Vec::all(2.0f) / (exp(x + x) + Vec::all(1.0f));
  float magnitude[kLanes], near_lanes[kLanes], far_lanes[kLanes];
  abs(x).store(magnitude);
  near.store(near_lanes);
  far.store(far_lanes);
  for (int i = 0; i < kLanes; ++i) far_lanes[i] = magnitude[i] < 0.625f ? near_lanes[i] : far_lanes[i];
  return Vec::load(far_lanes);
}

inline bool any_above(Vec x, float limit) {
#if PAGEDD_AVX512
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return x.max() > limit;
#endif
}

// Scores that the row may not see become kMasked. `first`: the key in lane 0.
inline Vec mask(Vec scores, int first, int visible_begin, int visible_end) {
  float lanes[kLanes];
  scores.store(lanes);
  for (int i = 0; i < kLanes; ++i) {
    const bool is_visible = (first + i >= visible_begin) & (first + i < visible_end);
    lanes[i] = is_visible ? lanes[i] : kMasked;
  }
  return Vec::load(lanes);
}

// weighted[r] += Σ_k weights[r][k] · values[k], for kRows rows and kVecs × 16 dimensions.
template <class Math, int kRows, int kVecs>
void add_weighted(const float* weights, const float* values, int num_words, int head_dim, float* weighted) {
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) sum[r][j] = Vec::load(weighted + r * head_dim + j * kLanes);
  for (int w = 0; w < num_words; ++w, values += head_dim) {
    Vec value[kVecs];
    for (int j = 0; j < kVecs; ++j) value[j] = Vec::load(values + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = Vec::all(weights[r * kTileKeys + w]);
      for (int j = 0; j < kVecs; ++j) sum[r][j] = Math::multiply_add(weight, value[j], sum[r][j]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) sum[r][j].store(weighted + r * head_dim + j * kLanes);
}

// Rows [first_row, first_row + kRows) against the first kVecs × 16 keys of the tile.
template <class Math, int kRows, int kVecs>
void attend_tile(const QueryRows& rows, int first_row, const KeyTile& tile, const Scoring& scoring, bool is_masked) {
  Vec score[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) score[r][j] = Vec::zero();
  const float* query = rows.query + size_t(first_row) * rows.num_words;
  const float* keys = tile.keys;
  for (int w = 0; w < rows.num_words; ++w, keys += kTileKeys) {
    Vec key[kVecs];
    for (int j = 0; j < kVecs; ++j) key[j] = Vec::load(keys + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec word = Vec::all(query[r * rows.num_words + w]);
      for (int j = 0; j < kVecs; ++j) score[r][j] = Math::multiply_add(word, key[j], score[r][j]);
    }
  }

  const Vec factor = Vec::all(scoring.factor);
  alignas(64) float weights[kRows * kTileKeys];
  float* weighted = rows.weighted + size_t(first_row) * rows.head_dim;
  for (int r = 0; r < kRows; ++r) {
    const int row = first_row + r;
    if (scoring.cap_factor != 0.0f)
      for (int j = 0; j < kVecs; ++j) score[r][j] = tanh(score[r][j] * Vec::all(scoring.cap_factor));
    for (int j = 0; j < kVecs; ++j) score[r][j] = score[r][j] * factor;
    if (is_masked) {
      const int position = rows.position(row);
      const int begin = scoring.sliding_window ? position - scoring.sliding_window + 1 : 0;
      const int end = position < tile.end_key ? position + 1 : tile.end_key;
      for (int j = 0; j < kVecs; ++j) score[r][j] = mask(score[r][j], tile.first_key + j * kLanes, begin, end);
    }
    Vec highest = score[r][0];
    for (int j = 1; j < kVecs; ++j) highest = max(highest, score[r][j]);
    float* sums = rows.sums + row * kLanes;
    float& reference = rows.maxima[row];
    if (any_above(highest, reference + kHeadroom)) {
      const float raised = highest.max();
      const Vec shrink = exp2(Vec::all(reference - raised));
      reference = raised;
      (Vec::load(sums) * shrink).store(sums);
      for (int d = 0; d < rows.head_dim; d += kLanes) {
        float* here = weighted + r * rows.head_dim + d;
        (Vec::load(here) * shrink).store(here);
      }
    }
    Vec sum = Vec::load(sums);
    for (int j = 0; j < kVecs; ++j) {
      score[r][j] = exp2(score[r][j] - Vec::all(reference));
      sum = sum + score[r][j];
    }
    sum.store(sums);
    Math::template store_words<kVecs>(score[r], weights + r * kTileKeys);
  }

  constexpr int kWords = kVecs * kLanes / Math::kValuesPerWord;
  const int num_vecs = rows.head_dim / kLanes;
  for (int j = 0; j < num_vecs;) {
    const float* values = tile.values + j * kLanes;
    float* sums = weighted + j * kLanes;
    const int left = num_vecs - j;
    if (left >= 4 && left != 5) {
      add_weighted<Math, kRows, 4>(weights, values, kWords, rows.head_dim, sums);
      j += 4;
    } else if (left >= 3) {
      add_weighted<Math, kRows, 3>(weights, values, kWords, rows.head_dim, sums);
      j += 3;
    } else if (left == 2) {
      add_weighted<Math, kRows, 2>(weights, values, kWords, rows.head_dim, sums);
      j += 2;
    } else {
      add_weighted<Math, kRows, 1>(weights, values, kWords, rows.head_dim, sums);
      j += 1;
    }
  }
}

}  // namespace pagedd::cpu
