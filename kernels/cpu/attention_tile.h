// Some query rows against one tile of keys, as far as possible in registers: scores, online softmax, weighted values.
//
// The softmax runs in powers of two: a row's weights are 2^(score − reference), where the reference is raised, and what
// was summed so far scaled down, only when a score exceeds it by more than kHeadroom (Milakov and Gimelshein 2018; the
// headroom is FlashAttention-4's). Knows nothing of blocks or sequences; attention.cpp walks them.
#pragma once

#include <cmath>

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
  // [kTileKeys] each, where the form of the cache leaves them out of its words.
  const float* key_scales;
  const float* value_scales;
  int first_key, end_key;
};

// Scores in powers of two: factor · s, or factor · tanh(cap_factor · s). And which keys a row sees.
struct Scoring {
  float factor;
  float cap_factor;  // 0: no cap
  int sliding_window;
  int closed_block_size;  // not 0: only keys of blocks of this size before the row's own

  int seen_end(int position) const {
    return closed_block_size ? position / closed_block_size * closed_block_size : position + 1;
  }
};

// 2^x, relative error below 2e-7 (minimax polynomial of degree 5 on [−½, ½]); 0 far below.
inline Vec exp2(Vec x) {
#if !PAGEDD_AVX512
  x = max(Vec::all(-200.0f), x);  // in this order NaN remains
#endif
  const Vec n = round(x), r = x - n;
  Vec p = fma(Vec::all(0.001327647129073739f), r, Vec::all(0.009675540961325169f));
  for (float c : {0.05550713092088699f, 0.24022120237350464f, 0.6931469440460205f, 1.0000001192092896f})
    p = fma(p, r, Vec::all(c));
  return scale_by_power_of_two(p, n);
}

inline bool any_above(Vec x, float limit) {
#if PAGEDD_AVX512
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  return x.max() > limit;
#endif
}

// scores[r][k] = query[r] · keys[k], for kRows rows and kVecs × 16 keys; scores are kTileKeys apart.
template <class Math, bool kIsScaled, int kRows, int kVecs>
void multiply_keys(const float* query, const KeyTile& tile, int num_words, float* scores) {
  const float* keys = tile.keys;
  Vec sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kVecs; ++j) sum[r][j] = Vec::zero();
  for (int w = 0; w < num_words; ++w, keys += kTileKeys) {
    Vec key[kVecs];
    for (int j = 0; j < kVecs; ++j) key[j] = Vec::load(keys + j * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec word = Vec::all(query[r * num_words + w]);
      for (int j = 0; j < kVecs; ++j) sum[r][j] = Math::multiply_add(word, key[j], sum[r][j]);
    }
  }
  for (int j = 0; j < kVecs; ++j) {
    [[maybe_unused]] const Vec scale = kIsScaled ? Vec::load(tile.key_scales + j * kLanes) : Vec::zero();
    for (int r = 0; r < kRows; ++r)
      (kIsScaled ? sum[r][j] * scale : sum[r][j]).store(scores + r * kTileKeys + j * kLanes);
  }
}

// weighted[r] += Σ_k weights[r][k] · values[k], for kRows rows and kVecs × 16 dimensions; weights are kTileKeys apart.
template <class Math, int kRows, int kVecs>
void add_values(const float* weights, const float* values, int num_words, int head_dim, float* weighted) {
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

// Turns a row's scores, kVecs × 16 of them, into weights, as words, where they are; with the values' scales if any.
template <class Math, bool kIsScaled, int kVecs>
void weigh(const QueryRows& rows, int row, float factor, [[maybe_unused]] const float* value_scales, float* scores) {
  Vec score[kVecs];
  for (int j = 0; j < kVecs; ++j) score[j] = Vec::load(scores + j * kLanes) * Vec::all(factor);
  Vec highest = score[0];
  for (int j = 1; j < kVecs; ++j) highest = max(highest, score[j]);
  float* sums = rows.sums + row * kLanes;
  float& reference = rows.maxima[row];
  if (any_above(highest, reference + kHeadroom)) {
    const float raised = highest.max();
    const Vec shrink = exp2(Vec::all(reference - raised));
    reference = raised;
    (Vec::load(sums) * shrink).store(sums);
    float* weighted = rows.weighted + size_t(row) * rows.head_dim;
    for (int d = 0; d < rows.head_dim; d += kLanes) (Vec::load(weighted + d) * shrink).store(weighted + d);
  }
  Vec sum = Vec::load(sums);
  for (int j = 0; j < kVecs; ++j) {
    score[j] = exp2(score[j] - Vec::all(reference));
    sum = sum + score[j];
    if constexpr (kIsScaled) score[j] = score[j] * Vec::load(value_scales + j * kLanes);
  }
  sum.store(sums);
  Math::template store_words<kVecs>(score, scores);
}

// The rare parts of scoring, on scores as they came from the product: a cap, and keys that the row may not see.
[[gnu::noinline]] inline void cap_scores(float* scores, int count, float cap_factor) {
  for (int i = 0; i < count; ++i) scores[i] = std::tanh(scores[i] * cap_factor);
}
[[gnu::noinline]] inline void mask_scores(float* scores, int count, int visible_begin, int visible_end, float masked) {
  for (int i = 0; i < count; ++i) scores[i] = (i >= visible_begin) & (i < visible_end) ? scores[i] : masked;
}

// Turns the scores of the rows [first_row, end_row) for the keys [first_key, end_key), and what follows them up to
// kVecs × 16, into weights. Scores are kTileKeys apart.
template <class Math, bool kIsScaled, int kVecs>
void weigh_rows(const QueryRows& rows, int first_row, int end_row, int first_key, int end_key, const Scoring& scoring,
                bool is_masked, const float* value_scales, float* scores) {
  for (int row = first_row; row < end_row; ++row, scores += kTileKeys) {
    if (scoring.cap_factor != 0.0f) cap_scores(scores, kVecs * kLanes, scoring.cap_factor);
    if (is_masked) {
      const int position = rows.position(row), seen_end = scoring.seen_end(position);
      const int end = seen_end < end_key ? seen_end : end_key;
      const int begin = scoring.sliding_window ? position - scoring.sliding_window + 1 : first_key;
      mask_scores(scores, kVecs * kLanes, begin - first_key, end - first_key, kMasked / scoring.factor);
    }
    weigh<Math, kIsScaled, kVecs>(rows, row, scoring.factor, value_scales, scores);
  }
}

// Rows [first_row, first_row + kRows) against the first kVecs × 16 keys of the tile.
template <class Math, bool kKeysAreScaled, bool kValuesAreScaled, int kRows, int kVecs>
void attend_tile(const QueryRows& rows, int first_row, const KeyTile& tile, const Scoring& scoring, bool is_masked) {
  alignas(64) float scores[kRows * kTileKeys];
  const float* query = rows.query + size_t(first_row) * rows.num_words;
  multiply_keys<Math, kKeysAreScaled, kRows, kVecs>(query, tile, rows.num_words, scores);
  weigh_rows<Math, kValuesAreScaled, kVecs>(rows, first_row, first_row + kRows, tile.first_key, tile.end_key, scoring,
                                            is_masked, tile.value_scales, scores);

  constexpr int kWords = kVecs * kLanes / Math::kValuesPerWord;
  const int head_dim = rows.head_dim;
  float* weighted = rows.weighted + size_t(first_row) * head_dim;
  int d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
    add_values<Math, kRows, 4>(scores, tile.values + d, kWords, head_dim, weighted + d);
  if (d + 2 * kLanes <= head_dim) {
    add_values<Math, kRows, 2>(scores, tile.values + d, kWords, head_dim, weighted + d);
    d += 2 * kLanes;
  }
  if (d < head_dim) add_values<Math, kRows, 1>(scores, tile.values + d, kWords, head_dim, weighted + d);
}

}  // namespace pagedd::cpu
