#include "wide_product.h"

#include <algorithm>
#include <cstring>

#include "quantized_row.h"
#include "register_block.h"
#include "wide_group.h"

namespace pagedd::cpu {

#if PAGEDD_VNNI
namespace {

constexpr int kMaxRows = 8;     // of a register block
constexpr int kRowBlock = 512;  // rows whose sums are kept while the inputs' groups go by

// Not __m512i, whose lanes are 64 bits wide: GCC 12 copies registers wherever a loop turns one type into the other.
using Int32s = int32_t __attribute__((vector_size(64)));

Int32s add_dots(Int32s sums, __m512i weights, __m512i values) {
  return Int32s(_mm512_dpbusd_epi32(__m512i(sums), weights, values));
}

// One wide group of the inputs of all rows.
struct Inputs {
  const int8_t* values;
  const float* scales;
  const float* sums;
  size_t row_bytes;
  int num_quads;

  Inputs from_row(int r) const { return {past(values, r), past(scales, r), past(sums, r), row_bytes, num_quads}; }

  template <class T>
  const T* past(const T* first_row, int r) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(first_row) + r * row_bytes);
  }
};

template <int rows>
void multiply_block(const WideGroup& weights, const Inputs& x, Vec (*sums)[kTilesAtOnce]) {
  Int32s dots[rows][kTilesAtOnce] = {};
  for (int quad = 0; quad < x.num_quads; ++quad) {
    __m512i columns[kTilesAtOnce];
    for (int t = 0; t < kTilesAtOnce; ++t) columns[t] = _mm512_load_si512(weights.q[quad][t]);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      int four;
      std::memcpy(&four, x.past(x.values, r) + quad * 4, 4);
      const __m512i values = _mm512_set1_epi32(four);
#pragma GCC unroll 2
      for (int t = 0; t < kTilesAtOnce; ++t) dots[r][t] = add_dots(dots[r][t], columns[t], values);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
    const Vec x_scale = Vec::all(*x.past(x.scales, r)), x_sum = Vec::all(*x.past(x.sums, r));
#pragma GCC unroll 2
    for (int t = 0; t < kTilesAtOnce; ++t) {
      const Vec dot = {_mm512_cvtepi32_ps(__m512i(dots[r][t]))};
      const Vec scale = Vec::load(weights.scale[t]), offset = Vec::load(weights.offset[t]);
      sums[r][t] = fma(offset, x_sum, fma(dot * scale, x_scale, sums[r][t]));
    }
  }
}

using Block = void (*)(const WideGroup&, const Inputs&, Vec (*)[kTilesAtOnce]);
constexpr Block kBlocks[kMaxRows] = {multiply_block<1>, multiply_block<2>, multiply_block<3>, multiply_block<4>,
                                     multiply_block<5>, multiply_block<6>, multiply_block<7>, multiply_block<8>};

// Where the groups of 32 of two tiles lie that make a wide group.
struct Source {
  const uint8_t* of[kTilesAtOnce];

  // Part `part` of `num_parts`: in a burst fetches would be dropped.
  void fetch(int part, int num_parts, size_t bytes) const {
    constexpr size_t kLine = 64;
    const size_t share = (bytes / num_parts / kLine + 1) * kLine;
    for (const uint8_t* tile : of)
      for (size_t at = part * share; at < std::min(bytes, (part + 1) * share); at += kLine)
        __builtin_prefetch(tile + at);
  }
};

template <class Group>
void multiply_groups(const Linear& linear, RowForm form, const uint8_t* prepared, int num_rows, int first_tile,
                     int end_tile, int next_tile, Epilogue epilogue, float* y, int64_t y_stride) {
  constexpr size_t kSourceBytes = kWideGroup / kGroup * sizeof(Group);
  const int in = linear.in_features, num_wide = num_groups(in, kWideGroup);
  const QuantizedRow row = quantized_row(prepared, in, kWideGroup);
  WideGroup weights;
  Vec sums[kRowBlock][kTilesAtOnce];
  for (int tile = first_tile; tile < end_tile; tile += kTilesAtOnce) {
    // An odd last tile is taken twice.
    const bool is_pair = tile + 1 < end_tile;
    const auto source = [&](int first, int g) {
      const uint8_t* start = linear.tiles + size_t(first) * linear.tile_bytes() + g * kSourceBytes;
      return Source{start, start + is_pair * linear.tile_bytes()};
    };
    for (int r = 0; r < num_rows; ++r)
      for (int t = 0; t < kTilesAtOnce; ++t) sums[r][t] = first_sum(linear, tile + t * is_pair);
    for (int g = 0; g < num_wide; ++g) {
      const int num_inputs = std::min(kWideGroup, in - g * kWideGroup);
      const Source here = source(tile, g);
      for (int t = 0; t < kTilesAtOnce; ++t)
        widen(reinterpret_cast<const Group*>(here.of[t]), num_inputs / kGroup, t, weights);
      const int following = tile + kTilesAtOnce < end_tile ? tile + kTilesAtOnce : next_tile;
      const Source next = g + 1 < num_wide ? source(tile, g + 1) : source(following, 0);
      const Inputs x{row.values + g * kWideGroup, row.scales + g, row.sums + g, form.bytes(), num_inputs / 4};
      for_each_row_block(num_rows, kMaxRows, [&](int block, int begin, int end) {
        next.fetch(block, num_row_blocks(num_rows, kMaxRows), kSourceBytes);
        kBlocks[end - begin - 1](weights, x.from_row(begin), sums + begin);
        if (g + 1 < num_wide) return;
        for (int r = begin; r < end; ++r)
          if (is_pair)
            finish(sums[r], tile, epilogue, y + r * y_stride);
          else
            finish({sums[r][0]}, tile, epilogue, y + r * y_stride);
      });
    }
  }
}

}  // namespace

void multiply_wide(const Linear& linear, RowForm form, const uint8_t* prepared, int first_row, int end_row,
                   int first_tile, int end_tile, int next_tile, Epilogue epilogue, float* y, int64_t y_stride) {
  const auto multiply_rows = linear.form == Form::kInt4 ? multiply_groups<Int4Group> : multiply_groups<Int8Group>;
  for (int begin = first_row; begin < end_row; begin += kRowBlock) {
    const int num_rows = std::min(kRowBlock, end_row - begin);
    const int turn = begin + kRowBlock < end_row ? first_tile : next_tile;
    multiply_rows(linear, form, prepared + size_t(begin) * form.bytes(), num_rows, first_tile, end_tile, turn, epilogue,
                  y + begin * y_stride, y_stride);
  }
}

#else

void multiply_wide(const Linear&, RowForm, const uint8_t*, int, int, int, int, int, Epilogue, float*, int64_t) {}

#endif

}  // namespace pagedd::cpu
