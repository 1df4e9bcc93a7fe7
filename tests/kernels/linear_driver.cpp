// Packing and products of linear.h as C functions, for tests that compile them for lesser processors.
#include <vector>

#include "linear.h"

using namespace pagedd::cpu;

extern "C" {

void multiply_rows(const float* weight, const float* bias, int out, int in, int form, const float* x, int rows,
                   float* y, float* unpacked) {
  std::vector<uint8_t> tiles(size_t(out / kTile) * Linear::tile_bytes(Form(form), in));
  pack_floats(weight, out, in, Form(form), tiles.data());
  const Linear linear{Form(form), in, out, tiles.data(), bias};
  const size_t row_bytes = prepared_row_bytes(linear.form, in);
  std::vector<uint8_t> prepared(rows * row_bytes);
  for (int row = 0; row < rows; ++row) prepare_row(linear.form, in, x + size_t(row) * in, &prepared[row * row_bytes]);
  multiply(linear, prepared.data(), 0, rows, 0, out / kTile, out / kTile, false, Epilogue::kStore, y, out);
  for (int row = 0; row < out; ++row) unpack_row(linear, row, unpacked + size_t(row) * in);
}

const char* instructions_of_driver() { return instructions(); }
}
