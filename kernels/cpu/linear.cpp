#include "linear.h"

#include <algorithm>

#include "vector_math.h"

#if PAGEDD_AVX512 && defined(__AVX512VNNI__)
#define PAGEDD_VNNI 1
#endif
#if PAGEDD_AVX512 && defined(__AVX512BF16__)
#define PAGEDD_DPBF16 1
#endif

namespace pagedd::cpu {
namespace {

constexpr int kQuads = kGroup / 4;  // dpbusd takes four inputs at a time
constexpr int kMaxRows = 8;         // rows of a register block
constexpr int kRowBlock = 64;       // rows whose inputs stay in the second-level cache while tiles go by

struct Int8Group {
  uint8_t q[kQuads][kTile][4];
  uint16_t scale[kTile], offset[kTile];
};
struct Int4Group {
  uint8_t q[kQuads / 2][kTile][4];  // low nibble: quad i, high nibble: quad i + 4
  uint16_t scale[kTile], offset[kTile];
};

// A prepared row of a quantized form: int8 values, then a scale and a scaled sum per group.
struct QuantizedRow {
  const int8_t* values;
  const float* scales;
  const float* sums;  // scale × Σ values
};

QuantizedRow quantized_row(const uint8_t* prepared, int in_features) {
  const auto* floats = reinterpret_cast<const float*>(prepared + in_features);
  return {reinterpret_cast<const int8_t*>(prepared), floats, floats + in_features / kGroup};
}

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
  uint16_t lanes[kLanes] = {bits};
  float out[kLanes];
  Vec::load_half(lanes).store(out);
  return out[0];
}

// ---- products: `rows` prepared rows times one tile, sums in registers ------------------------------------------------

template <int rows>
void multiply_float32(const uint8_t* tile, int in, const uint8_t* prepared, size_t row_bytes, Vec* sums) {
  const auto* w = reinterpret_cast<const float*>(tile);
  for (int k = 0; k < in; ++k) {
    const Vec column = Vec::load(w + size_t(k) * kTile);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r)
      sums[r] = fma(column, Vec::all(reinterpret_cast<const float*>(prepared + r * row_bytes)[k]), sums[r]);
  }
}

template <int rows>
void multiply_bfloat16(const uint8_t* tile, int in, const uint8_t* prepared, size_t row_bytes, Vec* sums) {
#if PAGEDD_DPBF16
  for (int k = 0; k < in; k += 2) {
    const __m512i column = _mm512_loadu_si512(tile + size_t(k) * kTile * 2);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      int pair;
      std::memcpy(&pair, prepared + r * row_bytes + size_t(k) * 2, 4);
      sums[r].v = _mm512_dpbf16_ps(sums[r].v, (__m512bh)column, (__m512bh)_mm512_set1_epi32(pair));
    }
  }
#else
  const auto* w = reinterpret_cast<const uint16_t*>(tile);
  for (int k = 0; k < in; ++k) {
    float column[kTile];
    for (int i = 0; i < kTile; ++i) column[i] = from_bfloat16(w[size_t(k / 2) * kTile * 2 + i * 2 + k % 2]);
    for (int r = 0; r < rows; ++r) {
      const float x = from_bfloat16(reinterpret_cast<const uint16_t*>(prepared + r * row_bytes)[k]);
      sums[r] = fma(Vec::load(column), Vec::all(x), sums[r]);
    }
  }
#endif
}

#if PAGEDD_VNNI
inline void load_quads(const Int8Group& group, __m512i* quads) {
  for (int i = 0; i < kQuads; ++i) quads[i] = _mm512_loadu_si512(group.q[i]);
}

inline void load_quads(const Int4Group& group, __m512i* quads) {
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int i = 0; i < kQuads / 2; ++i) {
    const __m512i both = _mm512_loadu_si512(group.q[i]);
    quads[i] = _mm512_and_si512(both, nibble);
    quads[i + kQuads / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
  }
}
#else
inline int quad_value(const Int8Group& group, int quad, int output, int i) { return group.q[quad][output][i]; }
inline int quad_value(const Int4Group& group, int quad, int output, int i) {
  const uint8_t both = group.q[quad % (kQuads / 2)][output][i];
  return quad < kQuads / 2 ? both & 15 : both >> 4;
}
#endif

template <class Group, int rows>
void multiply_quantized(const uint8_t* tile, int in, const uint8_t* prepared, size_t row_bytes, Vec* sums) {
  const auto* groups = reinterpret_cast<const Group*>(tile);
  for (int g = 0; g < in / kGroup; ++g) {
    const Group& group = groups[g];
    const Vec scale = Vec::load_half(group.scale), offset = Vec::load_half(group.offset);
#if PAGEDD_VNNI
    __m512i quads[kQuads], dots[rows];
    load_quads(group, quads);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) dots[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad)
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
        int four;
        std::memcpy(&four, prepared + r * row_bytes + g * kGroup + quad * 4, 4);
        dots[r] = _mm512_dpbusd_epi32(dots[r], quads[quad], _mm512_set1_epi32(four));
      }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const QuantizedRow row = quantized_row(prepared + r * row_bytes, in);
      const Vec dot = {_mm512_cvtepi32_ps(dots[r])};
      sums[r] = fma(dot * scale, Vec::all(row.scales[g]), sums[r]);
      sums[r] = fma(offset, Vec::all(row.sums[g]), sums[r]);
    }
#else
    for (int r = 0; r < rows; ++r) {
      const QuantizedRow row = quantized_row(prepared + r * row_bytes, in);
      float dots[kTile];
      for (int output = 0; output < kTile; ++output) {
        int dot = 0;
        for (int k = 0; k < kGroup; ++k)
          dot += quad_value(group, k / 4, output, k % 4) * row.values[g * kGroup + k];
        dots[output] = float(dot);
      }
      sums[r] = fma(Vec::load(dots) * scale, Vec::all(row.scales[g]), sums[r]);
      sums[r] = fma(offset, Vec::all(row.sums[g]), sums[r]);
    }
#endif
  }
}

template <int rows>
void multiply_tile(const Linear& linear, int tile_index, const uint8_t* prepared, size_t row_bytes, Vec* sums) {
  const uint8_t* tile = linear.tiles + tile_index * linear.tile_bytes();
  const Vec bias = linear.bias ? Vec::load(linear.bias + size_t(tile_index) * kTile) : Vec::zero();
  for (int r = 0; r < rows; ++r) sums[r] = bias;
  switch (linear.form) {
    case Form::kFloat32: return multiply_float32<rows>(tile, linear.in_features, prepared, row_bytes, sums);
    case Form::kBFloat16: return multiply_bfloat16<rows>(tile, linear.in_features, prepared, row_bytes, sums);
    case Form::kInt8: return multiply_quantized<Int8Group, rows>(tile, linear.in_features, prepared, row_bytes, sums);
    case Form::kInt4: return multiply_quantized<Int4Group, rows>(tile, linear.in_features, prepared, row_bytes, sums);
  }
}

template <int rows>
void multiply_rows(const Linear& linear, const uint8_t* prepared, size_t row_bytes, int tile, Epilogue epilogue,
                   float* y, int64_t y_stride) {
  Vec sums[rows];
  multiply_tile<rows>(linear, tile, prepared, row_bytes, sums);
  if (epilogue == Epilogue::kSiluAndMul) {
    Vec up[rows];
    multiply_tile<rows>(linear, tile + 1, prepared, row_bytes, up);
    for (int r = 0; r < rows; ++r) (silu(sums[r]) * up[r]).store(y + r * y_stride + size_t(tile / 2) * kTile);
    return;
  }
  for (int r = 0; r < rows; ++r) {
    float* out = y + r * y_stride + size_t(tile) * kTile;
    (epilogue == Epilogue::kAdd ? Vec::load(out) + sums[r] : sums[r]).store(out);
  }
}

void quantize_row(int in, const float* x, uint8_t* prepared) {
  auto* values = reinterpret_cast<int8_t*>(prepared);
  auto* scales = reinterpret_cast<float*>(prepared + in);
  float* sums = scales + in / kGroup;
  for (int g = 0; g < in / kGroup; ++g) {
    const Vec a = Vec::load(x + g * kGroup), b = Vec::load(x + g * kGroup + kLanes);
    const float largest = max(abs(a), abs(b)).max();
    const Vec inverse = Vec::all(largest > 0 ? 127.0f / largest : 0.0f);
    const Vec qa = round(a * inverse), qb = round(b * inverse);
    scales[g] = largest / 127.0f;
    sums[g] = scales[g] * (qa + qb).sum();
#if PAGEDD_AVX512
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + g * kGroup), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(qa.v)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(values + g * kGroup + kLanes),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(qb.v)));
#else
    for (int i = 0; i < kLanes; ++i) {
      values[g * kGroup + i] = int8_t(qa.v[i]);
      values[g * kGroup + kLanes + i] = int8_t(qb.v[i]);
    }
#endif
  }
}

// Asymmetric rounding of one group of 32 floats to `levels` steps above its minimum.
void quantize_group(const float* w, int levels, uint8_t* q, uint16_t* scale, uint16_t* offset) {
  const auto [low, high] = std::minmax_element(w, w + kGroup);
  *scale = to_half((*high - *low) / float(levels));
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
  for (int k = 0; k < in; ++k) {
    const int g = k / kGroup, i = k % kGroup;
    switch (linear.form) {
      case Form::kFloat32: out[k] = reinterpret_cast<const float*>(tile)[size_t(k) * kTile + output]; break;
      case Form::kBFloat16:
        out[k] = from_bfloat16(
            reinterpret_cast<const uint16_t*>(tile)[size_t(k / 2) * kTile * 2 + output * 2 + k % 2]);
        break;
      case Form::kInt8: {
        const auto& group = reinterpret_cast<const Int8Group*>(tile)[g];
        out[k] = from_half(group.scale[output]) * group.q[i / 4][output][i % 4] + from_half(group.offset[output]);
        break;
      }
      case Form::kInt4: {
        const auto& group = reinterpret_cast<const Int4Group*>(tile)[g];
        const uint8_t both = group.q[i % (kGroup / 2) / 4][output][i % 4];
        out[k] = from_half(group.scale[output]) * (i < kGroup / 2 ? both & 15 : both >> 4) +
                 from_half(group.offset[output]);
        break;
      }
    }
  }
}

size_t prepared_row_bytes(Form form, int in_features) {
  const size_t in = size_t(in_features);
  switch (form) {
    case Form::kFloat32: return in * 4;
    case Form::kBFloat16: return in * 2;
    default: return in + in / kGroup * 2 * sizeof(float);
  }
}

void prepare_row(Form form, int in_features, const float* x, uint8_t* prepared) {
  if (form == Form::kFloat32)
    std::memcpy(prepared, x, size_t(in_features) * 4);
  else if (form == Form::kBFloat16)
    for (int k = 0; k < in_features; ++k) reinterpret_cast<uint16_t*>(prepared)[k] = to_bfloat16(x[k]);
  else
    quantize_row(in_features, x, prepared);
}

void multiply(const Linear& linear, const uint8_t* prepared, int first_row, int end_row, int first_tile, int end_tile,
              Epilogue epilogue, float* y, int64_t y_stride) {
  const size_t row_bytes = prepared_row_bytes(linear.form, linear.in_features);
  const int tile_step = epilogue == Epilogue::kSiluAndMul ? 2 : 1;
  for (int block = first_row; block < end_row; block += kRowBlock) {
    const int block_end = std::min(block + kRowBlock, end_row);
    for (int tile = first_tile; tile < end_tile; tile += tile_step) {
      int row = block;
      const auto run = [&](auto rows) {
        constexpr int count = decltype(rows)::value;
        for (; row + count <= block_end; row += count)
          multiply_rows<count>(linear, prepared + row * row_bytes, row_bytes, tile, epilogue, y + row * y_stride,
                               y_stride);
      };
      run(std::integral_constant<int, kMaxRows>{});
      run(std::integral_constant<int, 4>{});
      run(std::integral_constant<int, 2>{});
      run(std::integral_constant<int, 1>{});
    }
  }
}

}  // namespace pagedd::cpu
