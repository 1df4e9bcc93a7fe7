// y = x · Wᵀ with W in one of four forms, each packed in tiles of 16 outputs so that a register holds one tile's column.
//
// Owns the packed layouts (packing.cpp) and the products (linear.cpp, wide_product.cpp). Threads, epilogues' meaning and
// whose weights these are belong to decoder.cpp.
//
//   form      a tile holds, for k in steps                            product
//   kFloat32  [in][16] float                                          FMA
//   kBFloat16 [in / 2][16][2] bfloat16                                dpbf16ps, else FMA; float sums
//   kInt8     per 32 inputs: [8][16][4] uint8, 16 scales, 16 offsets  dpbusd, else maddubs; integer sums per group
//   kInt4     per 32 inputs: [4][16][4] two nibbles, scales, offsets  the same after unpacking
//
// Quantized forms: weight = scale × q + offset with q unsigned, scale and offset float16: the numbers of a GGUF's own
// Q4_0, Q4_1 and Q8_0 blocks. Their inputs are quantized per row and group of 32 to int8, so that
// y = Σ_groups x_scale · (scale · Σ q·x + offset · Σ x). A row's result does not depend on how many others there are,
// unless the product may be wide: of many rows it then takes the weights in 8 bits (wide_product.h), which is faster.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedd::cpu {

constexpr int kTile = 16;   // outputs of a tile
constexpr int kGroup = 32;  // inputs that share a scale

// What this was compiled for; null where it is not worth using, as torch's own products are faster.
const char* instructions();

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

// Inputs of a product in the form that its weights want; `row_bytes` apart.
size_t prepared_row_bytes(Form form, int in_features);
void prepare_row(Form form, int in_features, const float* x, uint8_t* prepared);

enum class Epilogue {
  kStore,       // y = result
  kAdd,         // y += result
  kSiluAndMul,  // tiles come in pairs (gate, up): y[tile / 2] = silu(gate) · up
};

// Rows [first_row, end_row) times tiles [first_tile, end_tile). y: float32, `y_stride` floats a row.
// next_tile: what this thread is likely to turn to then; fetched meanwhile. May lie past the last one.
void multiply(const Linear& linear, const uint8_t* prepared, int first_row, int end_row, int first_tile, int end_tile,
              int next_tile, bool may_be_wide, Epilogue epilogue, float* y, int64_t y_stride);

}  // namespace pagedd::cpu
