// The product of many rows with quantized weights, as prompts and large batches are: the weights are taken in 8 bits, in which one scale holds
// for 192 inputs rather than 32.
//
// Owns its order of work. With scale and offset for every 32 inputs more than a quarter of the work is on floats; here a
// thread widens the weights of two tiles (wide_weights.h) and lets all rows go by them, so that most of what is left is
// dpbusd. Inputs are rounded as ever, in groups of 32; the weights that are held stay as they are.
#pragma once

#include "linear.h"
#include "weight_tiles.h"

namespace pagedd::cpu {

#if PAGEDD_VNNI
constexpr bool kHasWideProduct = true;
#else
constexpr bool kHasWideProduct = false;  // without dpbusd the floats are not what counts
#endif
constexpr int kLeastWideRows = 48;  // from here on it is faster, what widening costs included
constexpr int kWideMiddle = 128;    // of wide weights, which are unsigned bytes

// As `multiply`.
void multiply_wide(const Linear& linear, const uint8_t* prepared, int first_row, int end_row, int first_tile,
                   int end_tile, int next_tile, Epilogue epilogue, float* y, int64_t y_stride);

}  // namespace pagedd::cpu
