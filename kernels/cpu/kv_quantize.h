// Floats → a row of a quantized cache, to the last bit as kernels/row_form.py specifies it.
//
// Scales and offsets are rounded to bfloat16 first and values are quantized against the rounded ones. bfloat16 rather
// than float16 for its range: from 1e-35 to 1e38 everything survives. A row with NaN or infinity gets NaN as its scale.
#pragma once

#include <limits>

#include "kv_form.h"
#include "vector_math.h"

namespace pagedd::cpu {

// Integers between 0 and 15 → 8 bytes, the even ones in the low halves.
inline void store_nibbles(Vec x, uint8_t* to) {
  uint8_t bytes[kLanes];
  store_bytes(x, bytes);
  for (int i = 0; i < kLanes / 2; ++i) to[i] = uint8_t(bytes[2 * i] | bytes[2 * i + 1] << 4);
}

// float → e4m3, |x| ≤ 448, round to nearest even.
inline uint8_t to_fp8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  if (bits < 0x3c800000) {  // below 2^-6 steps are 2^-9, those of a float at 2^14
    std::memcpy(&x, &bits, 4);
    x += 0x1p14f;
    std::memcpy(&bits, &x, 4);
    return uint8_t(sign | (bits & 0xff));
  }
  bits += 0x7ffff + (bits >> 20 & 1);
  return uint8_t(sign | ((bits >> 20) - (120 << 3)));  // from float's bias to e4m3's
}

// The scale that spreads [0, range] over [0, steps], as it will be read again, and what to multiply by for that.
struct QuantizationStep {
  uint16_t scale;
  float inverse;  // 0 where all values become 0: too small to tell apart, or the scale is NaN

  QuantizationStep(float range, float per_step, bool is_finite) {
    const float step = range * per_step;
    if (!is_finite || step > std::numeric_limits<float>::max()) {
      scale = 0x7fc0;
      inverse = 0.0f;
      return;
    }
    scale = to_bfloat16(step);
    if (from_bfloat16(scale) < std::numeric_limits<float>::min()) scale = 0;  // subnormal, or −0
    inverse = scale ? 1.0f / from_bfloat16(scale) : 0.0f;
  }
};

// Adds NaN to `sum` where x is not finite, else 0.
inline Vec add_poison(Vec x, Vec sum) { return fma(x, Vec::zero(), sum); }

inline void quantize_int4(const float* x, int head_dim, RowPointer to) {
  for (int group = 0; group < head_dim; group += kInt4Group) {
    const int end = group + kInt4Group < head_dim ? group + kInt4Group : head_dim;
    Vec highest = Vec::load(x + group), lowest = Vec::zero() - highest, poison = Vec::zero();
    for (int d = group; d < end; d += kLanes) {
      const Vec value = Vec::load(x + d);
      highest = max(highest, value);
      lowest = max(lowest, Vec::zero() - value);
      poison = add_poison(value, poison);
    }
    // Rounded down: the lowest value is not below the first step.
    const float low = -lowest.max() + 0.0f;  // + 0: no negative zero
    uint32_t bits;
    std::memcpy(&bits, &low, 4);
    const bool is_finite = poison.sum() == 0.0f;
    const uint16_t offset = is_finite ? uint16_t((bits >> 16) + (bits >> 31 && bits & 0xffff)) : 0;
    const float base = from_bfloat16(offset);
    const QuantizationStep step(highest.max() - base, 1.0f / 15, is_finite);
    for (int d = group; d < end; d += kLanes) {
      const Vec q = round((Vec::load(x + d) - Vec::all(base)) * Vec::all(step.inverse));
      const Vec kept = step.inverse == 0.0f ? Vec::zero() : min(max(q, Vec::zero()), Vec::all(15.0f));
      store_nibbles(kept, to.values + d / 2);
    }
    uint8_t* scales = to.scales + group / kInt4Group * 4;
    std::memcpy(scales, &step.scale, 2);
    std::memcpy(scales + 2, &offset, 2);
  }
}

// int8 and fp8: one scale a row.
inline void quantize_row_scaled(KvType type, const float* x, int head_dim, RowPointer to) {
  Vec highest = Vec::zero(), poison = Vec::zero();
  for (int d = 0; d < head_dim; d += kLanes) {
    highest = max(highest, abs(Vec::load(x + d)));
    poison = add_poison(Vec::load(x + d), poison);
  }
  const float limit = type == KvType::kInt8 ? 127.0f : 448.0f;
  const QuantizationStep step(highest.max(), 1.0f / limit, poison.sum() == 0.0f);
  std::memcpy(to.scales, &step.scale, 2);
  if (step.inverse == 0.0f) {
    std::memset(to.values, 0, head_dim);
    return;
  }
  for (int d = 0; d < head_dim; d += kLanes) {
    const Vec scaled = min(max(Vec::load(x + d) * Vec::all(step.inverse), Vec::all(-limit)), Vec::all(limit));
    if (type == KvType::kInt8) {
      store_bytes(round(scaled), to.values + d);
    } else {
      float values[kLanes];
      scaled.store(values);
      for (int i = 0; i < kLanes; ++i) to.values[d + i] = to_fp8(values[i]);
    }
  }
}

// The keys of a full block for one head, [block_size, head_dim] bfloat16 → its record. A group is a dimension.
inline void quantize_channels(const uint16_t* keys, int block_size, int head_dim, RowPointer to) {
  for (int d = 0; d < head_dim; d += kLanes) {
    const auto load = [&](int row) {
      float x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = from_bfloat16(keys[row * head_dim + d + i]);
      return Vec::load(x);
    };
    Vec highest = load(0), lowest = Vec::zero() - highest, poison = Vec::zero();
    for (int row = 0; row < block_size; ++row) {
      highest = max(highest, load(row));
      lowest = max(lowest, Vec::zero() - load(row));
      poison = add_poison(load(row), poison);
    }
    float high[kLanes], low[kLanes], is_poisoned[kLanes], base[kLanes], inverse[kLanes];
    highest.store(high);
    lowest.store(low);
    poison.store(is_poisoned);
    for (int i = 0; i < kLanes; ++i) {
      const bool is_finite = is_poisoned[i] == 0.0f;
      base[i] = is_finite ? -low[i] + 0.0f : 0.0f;  // + 0: no negative zero
      const uint16_t offset = to_bfloat16(base[i]);  // exact: the keys are bfloat16
      const QuantizationStep step(high[i] - base[i], 1.0f / 15, is_finite);
      inverse[i] = step.inverse;
      uint8_t* scales = to.scales + 4 * (d + i);
      std::memcpy(scales, &step.scale, 2);
      std::memcpy(scales + 2, &offset, 2);
    }
    for (int row = 0; row < block_size; ++row) {
      float q[kLanes];
      round((load(row) - Vec::load(base)) * Vec::load(inverse)).store(q);
      for (int i = 0; i < kLanes; ++i) q[i] = inverse[i] == 0.0f ? 0.0f : q[i] < 0.0f ? 0.0f : q[i] > 15.0f ? 15.0f : q[i];
      store_nibbles(Vec::load(q), to.values + (row * head_dim + d) / 2);
    }
  }
}

inline void quantize_row(KvType type, const float* x, int head_dim, RowPointer to) {
  type == KvType::kInt4 ? quantize_int4(x, head_dim, to) : quantize_row_scaled(type, x, head_dim, to);
}

}  // namespace pagedd::cpu
