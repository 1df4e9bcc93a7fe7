// What products have in common: how rows are cut into register blocks, where a block's sums start, and where they go.
#pragma once

#include <cstdint>

#include "linear.h"
#include "vector_math.h"

namespace pagedd::cpu {

constexpr int kTilesAtOnce = 2;  // of a register block

inline int num_row_blocks(int num_rows, int most) { return (num_rows + most - 1) / most; }

// Calls use(block, begin, end) for blocks of nearly equal size, `most` rows or fewer: 16 rows are 4 + 4 + 4 + 4, not
// three fives and a costly single one.
template <class Use>
inline void for_each_row_block(int num_rows, int most, Use use) {
  const int num_blocks = num_row_blocks(num_rows, most);
  const int least = num_rows / num_blocks, num_larger = num_rows % num_blocks;
  for (int block = 0, row = 0; block < num_blocks; ++block) {
    const int next = row + least + (block < num_larger);
    use(block, row, next);
    row = next;
  }
}

inline Vec first_sum(const Linear& linear, int tile) {
  return linear.bias ? Vec::load(linear.bias + size_t(tile) * kTile) : Vec::zero();
}

// Sums of `tiles` tiles from first_tile on into the row that starts at `out`.
template <int tiles>
inline void finish(const Vec (&sums)[tiles], int first_tile, Epilogue epilogue, float* out) {
  if (epilogue == Epilogue::kSiluAndMul) {
    (silu(sums[0]) * sums[tiles - 1]).store(out + size_t(first_tile / 2) * kTile);
    return;
  }
  for (int t = 0; t < tiles; ++t) {
    float* lanes = out + size_t(first_tile + t) * kTile;
    (epilogue == Epilogue::kAdd ? Vec::load(lanes) + sums[t] : sums[t]).store(lanes);
  }
}

}  // namespace pagedd::cpu
