// How the quantized forms lie in a tile (see linear.h): a group of 32 inputs for all 16 outputs.
#pragma once

#include <cstdint>

#include "linear.h"

namespace pagedd::cpu {

constexpr int kQuads = kGroup / 4;  // dpbusd takes four inputs at a time

struct Int8Group {
  uint8_t q[kQuads][kTile][4];
  uint16_t scale[kTile], offset[kTile];
};
struct Int4Group {
  uint8_t q[kQuads / 2][kTile][4];  // low nibble: quad i, high nibble: quad i + 4
  uint16_t scale[kTile], offset[kTile];
};

}  // namespace pagedd::cpu
