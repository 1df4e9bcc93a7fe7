// A row of a quantized product's inputs: int8 values, then a float scale for each group, then a scaled sum for each.
//
// Owns the layout and the rounding. How many inputs make a group is the product's choice (linear.h); the last group of a
// row has what is left.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"
#include "vector_math.h"

namespace pagedd::cpu {

struct QuantizedRow {
  const int8_t* values;
  const float* scales;
  const float* sums;  // scale × Σ values
};

inline int num_groups(int in_features, int group) { return (in_features + group - 1) / group; }

inline QuantizedRow quantized_row(const uint8_t* prepared, int in_features, int group) {
  const auto* floats = reinterpret_cast<const float*>(prepared + in_features);
  return {reinterpret_cast<const int8_t*>(prepared), floats, floats + num_groups(in_features, group)};
}

// `count` values that share a scale, a multiple of kGroup. Returns the scale, and the scaled sum in `sum`.
inline float quantize_group(const float* x, int count, int8_t* values, float* sum) {
  constexpr float kLeastInput = 1e-35f;  // a group of smaller ones counts as zeros: its inverse would not be finite
  Vec largest_lanes = Vec::zero(), sum_lanes = Vec::zero();
  for (int i = 0; i < count; i += kLanes) largest_lanes = max(largest_lanes, abs(Vec::load(x + i)));
  const float largest = largest_lanes.max(), scale = largest / 127.0f;
  const Vec inverse = Vec::all(largest > kLeastInput ? 127.0f / largest : 0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const Vec q = round(Vec::load(x + i) * inverse);
    sum_lanes = sum_lanes + q;
#if PAGEDD_AVX512
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + i), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q.v)));
#else
    for (int lane = 0; lane < kLanes; ++lane) values[i + lane] = int8_t(q.v[lane]);
#endif
  }
  *sum = scale * sum_lanes.sum();
  return scale;
}

inline void quantize_row(const float* x, int in_features, int group, uint8_t* prepared) {
  auto* values = reinterpret_cast<int8_t*>(prepared);
  auto* scales = reinterpret_cast<float*>(prepared + in_features);
  float* sums = scales + num_groups(in_features, group);
  for (int k = 0; k < in_features; k += group, ++scales, ++sums)
    // The narrow group apart, so that its loops are unrolled.
    *scales = group == kGroup ? quantize_group(x + k, kGroup, values + k, sums)
                              : quantize_group(x + k, std::min(group, in_features - k), values + k, sums);
}

}  // namespace pagedd::cpu
