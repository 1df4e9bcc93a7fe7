// y = x · Wᵀ with W in one of four forms, each packed in tiles of 16 outputs so that a register holds one tile's column.
//
// Owns the packed layouts (packing.cpp) and the products (linear.cpp, wide_product.cpp). Threads, epilogues' meaning and
// whose weights these are belong to decoder.cpp.
//
//   form      a tile holds, for k in steps                            product
//   kFloat32  [in][16] float                                          FMA
//   kBFloat16 [in / 2][16][2] bfloat16                                dpbf16ps, float sums
//   kInt8     per 32 inputs: [8][16][4] uint8, 16 scales, 16 offsets  dpbusd, int32 sums per group
//   kInt4     per 32 inputs: [4][16][4] two nibbles, scales, offsets  the same after unpacking
//
// Quantized forms: weight = scale × q + offset with q unsigned, scale and offset float16: the numbers of a GGUF's own
// Q4_0, Q4_1 and Q8_0 blocks. Their inputs are quantized per row and group to int8, so that
// y = Σ_groups x_scale · (scale · Σ q·x + offset · Σ x).
// A group is 32 inputs, as the weights have them, and a row's result does not depend on how many others there are. A
// product of many rows may take wide groups instead (wide_product.h): faster, with inputs rounded a little more.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedd::cpu {

constexpr int kTile = 16;   // outputs of a tile
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kWideGroup = 192;

enum class Form { kFloat32, kBFloat16, kInt8, kInt4 };

struct Linear {
  Form form;
  int in_features;   // a multiple of kGroup
  int out_features;  // a multiple of kTile; the packing pads
  const uint8_t* tiles;
  const float* bias;  // [out_features] or null

  size_t tile_bytes() const { return tile_bytes(form, in_features); }
  static size_t tile_bytes(Form form, int in_features);
};

// Packs [out, in] float32; out and in must be multiples of kTile and kGroup. Quantized forms are rounded from the floats.
void pack_floats(const float* weight, int out, int in, Form form, uint8_t* tiles);
// Packs a quantized weight as it is: q [out, in] unsigned, scale and offset [out, in / 32] float16.
void pack_quantized(const uint8_t* q, const uint16_t* scale, const uint16_t* offset, int out, int in, Form form,
                    uint8_t* tiles);
// Row `index` of the weight back as floats: a tied embedding's look-up.
void unpack_row(const Linear& linear, int64_t index, float* out);

// How a product wants a row of its inputs.
struct RowForm {
  Form form;  // of its weights
  int in_features;
  int group;  // inputs of a quantized row that share a scale: kGroup or kWideGroup

  size_t bytes() const;
  void prepare(const float* x, uint8_t* prepared) const;
};

// may_be_wide: where many rows would be faster so.
RowForm row_form(const Linear& linear, int num_rows, bool may_be_wide);

enum class Epilogue {
  kStore,       // y = result
  kAdd,         // y += result
  kSiluAndMul,  // tiles come in pairs (gate, up): y[tile / 2] = silu(gate) · up
};

// Prepared rows [first_row, end_row), form.bytes() apart, times tiles [first_tile, end_tile). y: float32, `y_stride` floats a row.
// next_tile: what this thread is likely to turn to then; fetched meanwhile. May lie past the last one.
void multiply(const Linear& linear, RowForm form, const uint8_t* prepared, int first_row, int end_row, int first_tile,
              int end_tile, int next_tile, Epilogue epilogue, float* y, int64_t y_stride);

}  // namespace pagedd::cpu
