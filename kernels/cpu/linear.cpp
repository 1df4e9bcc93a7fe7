#include "linear.h"

#include <algorithm>
#include <cstring>

#include "byte_dots.h"
#include "quantized_row.h"
#include "register_block.h"
#include "vector_math.h"
#include "weight_tiles.h"
#include "wide_product.h"

#if PAGEDD_AVX512 && defined(__AVX512BF16__)
#define PAGEDD_DPBF16 1
#endif

namespace pagedd::cpu {
namespace {

constexpr int kMaxRows = 5;         // of a register block; with two tiles, 10 integer and 10 float sums
constexpr int kRowBlock = 64;       // rows whose inputs stay in the second-level cache while tiles go by

constexpr size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

// ---- products: a register block is `rows` prepared rows times `tiles` tiles ------------------------------------------

// Weights that are wanted next. A register block fetches its share while it computes, some lines with every group of
// inputs: in a burst they would be dropped.
struct Ahead {
  static constexpr size_t kLine = 64;
  const uint8_t* from;
  size_t lines_per_group;

  void fetch(int group) const {
    const uint8_t* line = from + group * lines_per_group * kLine;
    for (size_t i = 0; i < lines_per_group; ++i) __builtin_prefetch(line + i * kLine);
  }
};

struct Inputs {
  const uint8_t* rows;
  size_t row_bytes;
  int in_features;
  Ahead ahead;

  const uint8_t* row(int r) const { return rows + r * row_bytes; }
};

// Returned by value, so that the sums stay in registers while the tiles go by.
template <int rows, int tiles>
struct Sums {
  Vec of[rows][tiles];
};

template <int rows, int tiles>
Sums<rows, tiles> multiply_float32(const uint8_t* const (&tile)[tiles], Inputs x, Sums<rows, tiles> sums) {
  for (int k = 0; k < x.in_features; ++k) {
    if (k % kGroup == 0) x.ahead.fetch(k / kGroup);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      const Vec value = Vec::all(reinterpret_cast<const float*>(x.row(r))[k]);
#pragma GCC unroll 2
      for (int t = 0; t < tiles; ++t)
        sums.of[r][t] = fma(Vec::load(reinterpret_cast<const float*>(tile[t]) + size_t(k) * kTile), value, sums.of[r][t]);
    }
  }
  return sums;
}

template <int rows, int tiles>
Sums<rows, tiles> multiply_bfloat16(const uint8_t* const (&tile)[tiles], Inputs x, Sums<rows, tiles> sums) {
#if PAGEDD_DPBF16
  for (int k = 0; k < x.in_features; k += 2) {
    if (k % kGroup == 0) x.ahead.fetch(k / kGroup);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      int pair;
      std::memcpy(&pair, x.row(r) + size_t(k) * 2, 4);
      const __m512i values = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
      for (int t = 0; t < tiles; ++t) {
        const __m512i column = _mm512_loadu_si512(tile[t] + size_t(k) * kTile * 2);
        sums.of[r][t].v = _mm512_dpbf16_ps(sums.of[r][t].v, (__m512bh)column, (__m512bh)values);
      }
    }
  }
#else
  const auto x_at = [&](int r, int k) { return from_bfloat16(reinterpret_cast<const uint16_t*>(x.row(r))[k]); };
  for (int k = 0; k < x.in_features; k += 2) {
    if (k % kGroup == 0) x.ahead.fetch(k / kGroup);
#pragma GCC unroll 2
    for (int t = 0; t < tiles; ++t) {
      Vec first, second;
      load_bfloat16_pairs(tile[t] + size_t(k) * kTile * 2, first, second);
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r)
        sums.of[r][t] = fma(first, Vec::all(x_at(r, k)), fma(second, Vec::all(x_at(r, k + 1)), sums.of[r][t]));
    }
  }
#endif
  return sums;
}

template <class Group, int rows, int tiles>
Sums<rows, tiles> multiply_quantized(const uint8_t* const (&tile)[tiles], Inputs x, Sums<rows, tiles> sums) {
  const QuantizedRow first(const_cast<uint8_t*>(x.rows), x.in_features);
  const auto of_row = [&](const float* values, int r) {
    return reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(values) + r * x.row_bytes);
  };
  for (int g = 0; g < x.in_features / kGroup; ++g) {
    const Group* group[tiles];
    for (int t = 0; t < tiles; ++t) group[t] = reinterpret_cast<const Group*>(tile[t]) + g;
    x.ahead.fetch(g);
    Vec dots[rows][tiles];
#if PAGEDD_VNNI
    __m512i integers[rows][tiles];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < tiles; ++t) integers[r][t] = _mm512_setzero_si512();
    for_each_quad(group, [&](int quad, const __m512i* weights) {
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        int four;
        std::memcpy(&four, x.row(r) + g * kGroup + quad * 4, 4);
        const __m512i values = _mm512_set1_epi32(four);
#pragma GCC unroll 2
        for (int t = 0; t < tiles; ++t) integers[r][t] = _mm512_dpbusd_epi32(integers[r][t], weights[t], values);
      }
    });
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
      for (int t = 0; t < tiles; ++t) dots[r][t] = {_mm512_cvtepi32_ps(integers[r][t])};
#else
    const int8_t* values[rows];
    for (int r = 0; r < rows; ++r) values[r] = reinterpret_cast<const int8_t*>(x.row(r)) + g * kGroup;
    dots_of_group(group, values, dots);
#endif
#pragma GCC unroll 2
    for (int t = 0; t < tiles; ++t) {
      const Vec scale = Vec::load_half(group[t]->scale), offset = Vec::load_half(group[t]->offset);
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        const Vec x_scale = Vec::all(of_row(first.scales, r)[g]), x_sum = Vec::all(of_row(first.sums, r)[g]);
        sums.of[r][t] = fma(offset, x_sum, fma(dots[r][t] * scale, x_scale, sums.of[r][t]));
      }
    }
  }
  return sums;
}

template <int rows, int tiles>
Sums<rows, tiles> multiply_tiles(const Linear& linear, int first_tile, Inputs x) {
  const uint8_t* tile[tiles];
  Sums<rows, tiles> start;
  for (int t = 0; t < tiles; ++t) {
    tile[t] = linear.tiles + size_t(first_tile + t) * linear.tile_bytes();
    for (int r = 0; r < rows; ++r) start.of[r][t] = first_sum(linear, first_tile + t);
  }
  switch (linear.form) {
    case Form::kFloat32: return multiply_float32<rows, tiles>(tile, x, start);
    case Form::kBFloat16: return multiply_bfloat16<rows, tiles>(tile, x, start);
    case Form::kInt8: return multiply_quantized<Int8Group, rows, tiles>(tile, x, start);
    case Form::kInt4: return multiply_quantized<Int4Group, rows, tiles>(tile, x, start);
  }
  return start;
}

// One register block and what becomes of it. Inputs by reference: a copy would be read in wider pieces than it was just
// written in, and wait for them.
template <int rows, int tiles>
void multiply_block(const Linear& linear, const Inputs& x, int first_tile, Epilogue epilogue, float* y,
                    int64_t y_stride) {
  const Sums<rows, tiles> sums = multiply_tiles<rows, tiles>(linear, first_tile, x);
  for (int r = 0; r < rows; ++r) finish(sums.of[r], first_tile, epilogue, y + r * y_stride);
}

using Block = void (*)(const Linear&, const Inputs&, int, Epilogue, float*, int64_t);
constexpr Block kBlocks[kTilesAtOnce][kMaxRows] = {
    {multiply_block<1, 1>, multiply_block<2, 1>, multiply_block<3, 1>, multiply_block<4, 1>, multiply_block<5, 1>},
    {multiply_block<1, 2>, multiply_block<2, 2>, multiply_block<3, 2>, multiply_block<4, 2>, multiply_block<5, 2>},
};

}  // namespace

const char* instructions() {
#if PAGEDD_VNNI && PAGEDD_DPBF16
  return "AVX-512 with VNNI and BF16";
#elif PAGEDD_VNNI
  return "AVX-512 with VNNI";
#elif PAGEDD_AVX512
  return "AVX-512";
#elif PAGEDD_AVX2 && defined(__AVXVNNI__)
  return "AVX2 with VNNI";
#elif PAGEDD_AVX2
  return "AVX2";
#else
  return nullptr;
#endif
}

size_t prepared_row_bytes(Form form, int in_features) {
  const size_t in = size_t(in_features);
  switch (form) {
    case Form::kFloat32: return in * 4;
    case Form::kBFloat16: return in * 2;
    default: return QuantizedRow::num_bytes(in_features);
  }
}

void prepare_row(Form form, int in_features, const float* x, uint8_t* prepared) {
  if (form == Form::kFloat32)
    std::memcpy(prepared, x, size_t(in_features) * 4);
  else if (form == Form::kBFloat16)
    for (int k = 0; k < in_features; ++k) reinterpret_cast<uint16_t*>(prepared)[k] = to_bfloat16(x[k]);
  else
    quantize_row(x, in_features, prepared);
}

void multiply(const Linear& linear, const uint8_t* prepared, int first_row, int end_row, int first_tile, int end_tile,
              int next_tile, bool may_be_wide, Epilogue epilogue, float* y, int64_t y_stride) {
  const bool is_quantized = linear.form == Form::kInt8 || linear.form == Form::kInt4;
  if (kHasWideProduct && may_be_wide && is_quantized && end_row - first_row >= kLeastWideRows) {
    multiply_wide(linear, prepared, first_row, end_row, first_tile, end_tile, next_tile, epilogue, y, y_stride);
    return;
  }
  const size_t row_bytes = prepared_row_bytes(linear.form, linear.in_features), tile_bytes = linear.tile_bytes();
  for (int begin = first_row; begin < end_row; begin += kRowBlock) {
    const int num_rows = std::min(kRowBlock, end_row - begin);
    const size_t share = divide_up(kTilesAtOnce * tile_bytes, num_row_blocks(num_rows, kMaxRows));
    const size_t lines_per_group = divide_up(share, size_t(linear.in_features / kGroup) * Ahead::kLine);
    for (int tile = first_tile; tile < end_tile; tile += kTilesAtOnce) {
      const int num_tiles = std::min(kTilesAtOnce, end_tile - tile);
      const int turn = begin + kRowBlock < end_row ? first_tile : next_tile;
      const int wanted = tile + kTilesAtOnce < end_tile ? tile + kTilesAtOnce : turn;
      for_each_row_block(num_rows, kMaxRows, [&](int block, int row, int next) {
        const Inputs x{prepared + size_t(begin + row) * row_bytes, row_bytes, linear.in_features,
                       {linear.tiles + wanted * tile_bytes + block * share, lines_per_group}};
        kBlocks[num_tiles - 1][next - row - 1](linear, x, tile, epilogue, y + (begin + row) * y_stride, y_stride);
      });
    }
  }
}

}  // namespace pagedd::cpu
