// A row of a quantized product's inputs: int8 values, then what belongs to each group of 32.
//
// Owns the layout and the rounding.
#pragma once

#include <cmath>
#include <cstdint>

#include "linear.h"
#include "vector_math.h"
#include "wide_product.h"

namespace pagedd::cpu {

struct QuantizedRow {
  int8_t* values;
  float* scales;
  float* sums;      // scale × Σ values: what offsets are multiplied with
  int32_t* starts;  // −kWideMiddle · Σ values, for wide weights

  QuantizedRow(uint8_t* prepared, int in)
      : values(reinterpret_cast<int8_t*>(prepared)),
        scales(reinterpret_cast<float*>(prepared + in)),
        sums(scales + in / kGroup),
        starts(reinterpret_cast<int32_t*>(sums + in / kGroup)) {}

  static size_t num_bytes(int in) { return in + in / kGroup * (2 * sizeof(float) + sizeof(int32_t)); }
};

inline void quantize_row(const float* x, int in, uint8_t* prepared) {
  constexpr float kLeastInput = 1e-35f;  // a group of smaller ones counts as zeros: its inverse would not be finite
  const QuantizedRow row(prepared, in);
  for (int g = 0; g < in / kGroup; ++g, x += kGroup) {
    const Vec a = Vec::load(x), b = Vec::load(x + kLanes);
    const float largest = max(abs(a), abs(b)).max();
    const Vec inverse = Vec::all(largest > kLeastInput ? 127.0f / largest : 0.0f);
    const Vec qa = round(a * inverse), qb = round(b * inverse);
    const float sum = (qa + qb).sum();  // not a number if an input is none, and so must then be each result
    const bool is_number = !std::isnan(sum);
    row.scales[g] = is_number ? largest / 127.0f : sum;
    row.sums[g] = row.scales[g] * sum;
    row.starts[g] = is_number ? -kWideMiddle * int32_t(sum) : 0;
    int8_t* const values = row.values + g * kGroup;
    store_bytes(qa, values);
    store_bytes(qb, values + kLanes);
  }
}

}  // namespace pagedd::cpu
