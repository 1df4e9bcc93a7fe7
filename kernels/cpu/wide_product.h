// The product of many rows with quantized weights, for prompts: a scale holds for a wide group of inputs.
//
// Owns its order of work. With a scale for every 32 inputs a quarter of the work is on floats; here a thread widens a
// group of two tiles (wide_group.h) and lets all rows go by it, so that hardly anything but dpbusd is left. The weights
// that are held stay as they are.
#pragma once

#include "linear.h"
#include "weight_tiles.h"

namespace pagedd::cpu {

#if PAGEDD_VNNI
constexpr bool kHasWideProduct = true;
#else
constexpr bool kHasWideProduct = false;  // without dpbusd the floats are not what counts
#endif
constexpr int kLeastWideRows = 96;  // from here on it is faster, what widening costs included

// As `multiply`, where the rows' form has wide groups.
void multiply_wide(const Linear& linear, RowForm form, const uint8_t* prepared, int first_row, int end_row,
                   int first_tile, int end_tile, int next_tile, Epilogue epilogue, float* y, int64_t y_stride);

}  // namespace pagedd::cpu
