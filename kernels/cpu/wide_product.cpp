#include "wide_product.h"

#include <algorithm>
#include <cstring>

#include "quantized_row.h"
#include "register_block.h"
#include "wide_weights.h"

namespace pagedd::cpu {

#if PAGEDD_VNNI
namespace {

constexpr int kMaxRows = 5;     // of a register block: with two tiles, 10 sums of a group, of a range and of all
constexpr int kRowBlock = 512;  // rows whose sums are kept while the inputs go by
constexpr int kGroupsOfRange = kWideRange / kGroup;

// Not __m512i, whose lanes are 64 bits wide: GCC 12 copies registers wherever a loop turns one type into the other.
using Int32s = int32_t __attribute__((vector_size(64)));

Int32s add_dots(Int32s sums, __m512i weights, __m512i values) {
  return Int32s(_mm512_dpbusd_epi32(__m512i(sums), weights, values));
}

// Groups of the inputs of rows that lie `row_bytes` apart.
struct Inputs {
  const int8_t* values;
  const float* scales;
  const int32_t* starts;
  size_t row_bytes;
  int num_groups;

  Inputs from_row(int r) const { return {past(values, r), past(scales, r), past(starts, r), row_bytes, num_groups}; }

  template <class T>
  const T* past(const T* first_row, int r) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(first_row) + r * row_bytes);
  }
};

// sums[r] += Σ_ranges scale · Σ_groups x_scale · Σ (q' − middle) · x
template <int rows>
void multiply_block(const WideWeights& weights, const Inputs& x, Vec (*sums)[kTilesAtOnce]) {
  Vec total[rows][kTilesAtOnce];
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int t = 0; t < kTilesAtOnce; ++t) total[r][t] = sums[r][t];
  for (int first = 0; first < x.num_groups; first += kGroupsOfRange) {
    Vec own[rows][kTilesAtOnce];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
      for (int t = 0; t < kTilesAtOnce; ++t) own[r][t] = Vec::zero();
    const int end = std::min(x.num_groups, first + kGroupsOfRange);
    for (int g = first; g < end; ++g) {
      Int32s dots[rows][kTilesAtOnce];
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < kTilesAtOnce; ++t) dots[r][t] = Int32s(_mm512_set1_epi32(x.past(x.starts, r)[g]));
#pragma GCC unroll 8
      for (int quad = 0; quad < kQuads; ++quad) {
        __m512i columns[kTilesAtOnce];
#pragma GCC unroll 2
        for (int t = 0; t < kTilesAtOnce; ++t) columns[t] = _mm512_load_si512(weights.q[g * kQuads + quad][t]);
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) {
          int four;
          std::memcpy(&four, x.past(x.values, r) + g * kGroup + quad * 4, 4);
          const __m512i values = _mm512_set1_epi32(four);
#pragma GCC unroll 2
          for (int t = 0; t < kTilesAtOnce; ++t) dots[r][t] = add_dots(dots[r][t], columns[t], values);
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) {
        const Vec scale = Vec::all(x.past(x.scales, r)[g]);
#pragma GCC unroll 2
        for (int t = 0; t < kTilesAtOnce; ++t)
          own[r][t] = fma({_mm512_cvtepi32_ps(__m512i(dots[r][t]))}, scale, own[r][t]);
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < kTilesAtOnce; ++t) {
      const Vec scale = Vec::load(weights.scale[first / kGroupsOfRange][t]);
#pragma GCC unroll 6
      for (int r = 0; r < rows; ++r) total[r][t] = fma(own[r][t], scale, total[r][t]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 2
    for (int t = 0; t < kTilesAtOnce; ++t) sums[r][t] = total[r][t];
}

using Block = void (*)(const WideWeights&, const Inputs&, Vec (*)[kTilesAtOnce]);
constexpr Block kBlocks[kMaxRows] = {multiply_block<1>, multiply_block<2>, multiply_block<3>,
                                     multiply_block<4>, multiply_block<5>};

// Where the groups of 32 of two tiles lie that are widened together.
struct Source {
  const uint8_t* of[kTilesAtOnce];
  size_t num_bytes;  // of each

  // Part `part` of `num_parts`: in a burst fetches would be dropped.
  void fetch(int part, int num_parts) const {
    constexpr size_t kLine = 64;
    const size_t share = (num_bytes / num_parts / kLine + 1) * kLine;
    for (const uint8_t* tile : of)
      for (size_t at = part * share; at < std::min(num_bytes, (part + 1) * share); at += kLine)
        __builtin_prefetch(tile + at);
  }
};

template <class Group>
void multiply_groups(const Linear& linear, const uint8_t* prepared, int num_rows, int first_tile, int end_tile,
                     int next_tile, Epilogue epilogue, float* y, int64_t y_stride) {
  const int in = linear.in_features;
  const size_t row_bytes = prepared_row_bytes(linear.form, in);
  const QuantizedRow row(const_cast<uint8_t*>(prepared), in);
  WideWeights weights;
  Vec sums[kRowBlock][kTilesAtOnce];
  for (int tile = first_tile; tile < end_tile; tile += kTilesAtOnce) {
    // An odd last tile is taken twice.
    const bool is_pair = tile + 1 < end_tile;
    const auto source = [&](int first, int begin) {
      const uint8_t* start = linear.tiles + size_t(first) * linear.tile_bytes() + begin / kGroup * sizeof(Group);
      const int num_groups = std::min(kWideInputs, in - begin) / kGroup;
      return Source{{start, start + is_pair * linear.tile_bytes()}, num_groups * sizeof(Group)};
    };
    const auto groups_of = [](const Source& source, int t) { return reinterpret_cast<const Group*>(source.of[t]); };
    for (int r = 0; r < num_rows; ++r)
      for (int t = 0; t < kTilesAtOnce; ++t) sums[r][t] = first_sum(linear, tile + t * is_pair);
    for (int begin = 0; begin < in; begin += kWideInputs) {
      const Source here = source(tile, begin);
      const int num_groups = int(here.num_bytes / sizeof(Group));
      for (int t = 0; t < kTilesAtOnce; ++t)
        for (int first = 0; first < num_groups; first += kGroupsOfRange)
          widen(groups_of(here, t) + first, std::min(kGroupsOfRange, num_groups - first), first / kGroupsOfRange, t,
                weights);
      const bool is_last = begin + kWideInputs >= in;
      const int following = tile + kTilesAtOnce < end_tile ? tile + kTilesAtOnce : next_tile;
      const Source next = is_last ? source(following, 0) : source(tile, begin + kWideInputs);
      const Inputs x{row.values + begin, row.scales + begin / kGroup, row.starts + begin / kGroup, row_bytes, num_groups};
      for_each_row_block(num_rows, kMaxRows, [&](int block, int first, int end) {
        next.fetch(block, num_row_blocks(num_rows, kMaxRows));
        kBlocks[end - first - 1](weights, x.from_row(first), sums + first);
        if (!is_last) return;
        for (int r = first; r < end; ++r)
          if (is_pair)
            finish(sums[r], tile, epilogue, y + r * y_stride);
          else
            finish({sums[r][0]}, tile, epilogue, y + r * y_stride);
      });
    }
  }
}

}  // namespace

void multiply_wide(const Linear& linear, const uint8_t* prepared, int first_row, int end_row, int first_tile,
                   int end_tile, int next_tile, Epilogue epilogue, float* y, int64_t y_stride) {
  const auto multiply_rows = linear.form == Form::kInt4 ? multiply_groups<Int4Group> : multiply_groups<Int8Group>;
  const size_t row_bytes = prepared_row_bytes(linear.form, linear.in_features);
  for (int begin = first_row; begin < end_row; begin += kRowBlock) {
    const int num_rows = std::min(kRowBlock, end_row - begin);
    const int turn = begin + kRowBlock < end_row ? first_tile : next_tile;
    multiply_rows(linear, prepared + begin * row_bytes, num_rows, first_tile, end_tile, turn, epilogue,
                  y + begin * y_stride, y_stride);
  }
}

#else

void multiply_wide(const Linear&, const uint8_t*, int, int, int, int, int, Epilogue, float*, int64_t) {}

#endif

}  // namespace pagedd::cpu
