// Weights into tiles, and back.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear.h"
#include "vector_math.h"
#include "weight_tiles.h"

namespace pagedd::cpu {
namespace {

uint16_t to_half(float x) {
#if PAGEDD_AVX512
  return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  _Float16 half = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
#endif
}

float from_half(uint16_t bits) {
#if PAGEDD_AVX512
  return _cvtsh_ss(bits);
#else
  uint16_t lanes[kLanes] = {bits};
  float out[kLanes];
  Vec::load_half(lanes).store(out);
  return out[0];
#endif
}

// Asymmetric rounding of one group of 32 floats to `levels` steps above its minimum.
void quantize_group(const float* w, int levels, uint8_t* q, uint16_t* scale, uint16_t* offset) {
  const auto [low, high] = std::minmax_element(w, w + kGroup);
  float none = 0;  // not a number if a weight is none, or infinite, and so must then be each result
  for (int i = 0; i < kGroup; ++i) none += 0.0f * w[i];
  *scale = to_half((*high - *low) / float(levels) + none);
  *offset = to_half(*low);
  const float step = from_half(*scale), start = from_half(*offset);
  for (int i = 0; i < kGroup; ++i)
    q[i] = step > 0 ? uint8_t(std::clamp(std::nearbyint((w[i] - start) / step), 0.0f, float(levels))) : 0;
}

void put(Int8Group& group, int output, const uint8_t* q) {
  for (int k = 0; k < kGroup; ++k) group.q[k / 4][output][k % 4] = q[k];
}

void put(Int4Group& group, int output, const uint8_t* q) {
  for (int k = 0; k < kGroup / 2; ++k)
    group.q[k / 4][output][k % 4] = uint8_t(q[k] | (q[k + kGroup / 2] << 4));
}

// The 32 values of one output, in order.
void take(const Int8Group& group, int output, uint8_t* q) {
  for (int quad = 0; quad < kQuads; ++quad) std::memcpy(q + quad * 4, group.q[quad][output], 4);
}

void take(const Int4Group& group, int output, uint8_t* q) {
  for (int quad = 0; quad < kQuads / 2; ++quad)
    for (int i = 0; i < 4; ++i) {
      q[quad * 4 + i] = group.q[quad][output][i] & 15;
      q[quad * 4 + i + kGroup / 2] = group.q[quad][output][i] >> 4;
    }
}

template <class Group>
void unpack_groups(const uint8_t* tile, int output, int in, float* out) {
  const auto* groups = reinterpret_cast<const Group*>(tile);
  for (int g = 0; g < in / kGroup; ++g, out += kGroup) {
    uint8_t q[kGroup];
    take(groups[g], output, q);
    const float scale = from_half(groups[g].scale[output]), offset = from_half(groups[g].offset[output]);
    for (int k = 0; k < kGroup; ++k) out[k] = scale * float(q[k]) + offset;
  }
}

template <class Group, class FillGroup>
void pack_groups(int out, int in, uint8_t* tiles, FillGroup fill_group) {
  auto* groups = reinterpret_cast<Group*>(tiles);
  const int per_row = in / kGroup;
  for (int n = 0; n < out; ++n)
    for (int g = 0; g < per_row; ++g) {
      Group& group = groups[size_t(n / kTile) * per_row + g];
      uint8_t q[kGroup];
      fill_group(n, g, q, &group.scale[n % kTile], &group.offset[n % kTile]);
      put(group, n % kTile, q);
    }
}

template <class FillGroup>
void pack_form(Form form, int out, int in, uint8_t* tiles, FillGroup fill_group) {
  if (form == Form::kInt4)
    pack_groups<Int4Group>(out, in, tiles, fill_group);
  else
    pack_groups<Int8Group>(out, in, tiles, fill_group);
}

}  // namespace

size_t Linear::tile_bytes(Form form, int in_features) {
  const size_t in = size_t(in_features);
  switch (form) {
    case Form::kFloat32: return in * kTile * 4;
    case Form::kBFloat16: return in * kTile * 2;
    case Form::kInt8: return in / kGroup * sizeof(Int8Group);
    case Form::kInt4: return in / kGroup * sizeof(Int4Group);
  }
  return 0;
}

void pack_floats(const float* weight, int out, int in, Form form, uint8_t* tiles) {
  if (form == Form::kFloat32 || form == Form::kBFloat16) {
    for (int n = 0; n < out; ++n)
      for (int k = 0; k < in; ++k) {
        const float w = weight[size_t(n) * in + k];
        const size_t tile = size_t(n / kTile) * in * kTile;
        if (form == Form::kFloat32)
          reinterpret_cast<float*>(tiles)[tile + size_t(k) * kTile + n % kTile] = w;
        else
          reinterpret_cast<uint16_t*>(tiles)[tile + size_t(k / 2) * kTile * 2 + n % kTile * 2 + k % 2] = to_bfloat16(w);
      }
    return;
  }
  const int levels = form == Form::kInt4 ? 15 : 255;
  pack_form(form, out, in, tiles, [&](int n, int g, uint8_t* q, uint16_t* scale, uint16_t* offset) {
    quantize_group(weight + size_t(n) * in + g * kGroup, levels, q, scale, offset);
  });
}

void pack_quantized(const uint8_t* q, const uint16_t* scale, const uint16_t* offset, int out, int in, Form form,
                    uint8_t* tiles) {
  pack_form(form, out, in, tiles, [&](int n, int g, uint8_t* group, uint16_t* group_scale, uint16_t* group_offset) {
    std::memcpy(group, q + size_t(n) * in + g * kGroup, kGroup);
    *group_scale = scale[size_t(n) * (in / kGroup) + g];
    *group_offset = offset[size_t(n) * (in / kGroup) + g];
  });
}

void unpack_row(const Linear& linear, int64_t index, float* out) {
  const int in = linear.in_features, output = int(index % kTile);
  const uint8_t* tile = linear.tiles + size_t(index / kTile) * linear.tile_bytes();
  switch (linear.form) {
    case Form::kFloat32:
      for (int k = 0; k < in; ++k) out[k] = reinterpret_cast<const float*>(tile)[size_t(k) * kTile + output];
      break;
    case Form::kBFloat16: {
      const auto* pairs = reinterpret_cast<const uint16_t*>(tile) + output * 2;
      for (int k = 0; k < in; ++k) out[k] = from_bfloat16(pairs[size_t(k / 2) * kTile * 2 + k % 2]);
      break;
    }
    case Form::kInt8: unpack_groups<Int8Group>(tile, output, in, out); break;
    case Form::kInt4: unpack_groups<Int4Group>(tile, output, in, out); break;
  }
}

}  // namespace pagedd::cpu
