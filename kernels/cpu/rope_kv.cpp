#include "rope_kv.h"

#include <cmath>
#include <cstring>

#include "vector_math.h"

namespace pagedd::cpu {
namespace {

// x = x / sqrt(mean(x²) + eps) · weight
void normalise(float* x, const float* weight, int size, float eps) {
  Vec squares = Vec::zero();
  for (int i = 0; i < size; i += kLanes) squares = fma(Vec::load(x + i), Vec::load(x + i), squares);
  const Vec factor = Vec::all(1.0f / std::sqrt(squares.sum() / float(size) + eps));
  for (int i = 0; i < size; i += kLanes) (Vec::load(x + i) * factor * Vec::load(weight + i)).store(x + i);
}

// Turns the pairs (x[d], x[d + half]) by the angles.
void rotate(float* __restrict x, const float* __restrict cos, const float* __restrict sin, int half) {
  for (int d = 0; d < half; ++d) {
    const float first = x[d], second = x[d + half];
    x[d] = first * cos[d] - second * sin[d];
    x[d + half] = second * cos[d] + first * sin[d];
  }
}

void store_row(const float* x, int size, KvType type, void* plane, int64_t row) {
  if (type == KvType::kFloat32) {
    std::memcpy(static_cast<float*>(plane) + row * size, x, size * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(plane) + row * size;
  for (int d = 0; d < size; ++d) to[d] = to_bfloat16(x[d]);
}

}  // namespace

void rope_and_write_kv(float* qkv, int64_t stride, int64_t first_row, int64_t end_row, int num_heads, const float* cos,
                       const float* sin, const float* query_norm, const float* key_norm, float eps,
                       const int64_t* slots, const KvLayer& kv) {
  const int head_dim = kv.head_dim, half = head_dim / 2;
  for (int64_t row = first_row; row < end_row; ++row) {
    float* heads = qkv + row * stride;
    for (int head = 0; head < num_heads + kv.num_kv_heads; ++head) {
      float* x = heads + head * head_dim;
      const float* norm = head < num_heads ? query_norm : key_norm;
      if (norm) normalise(x, norm, head_dim, eps);
      rotate(x, cos + row * half, sin + row * half, half);
    }
    const int64_t block = slots[row] / kv.block_size, offset = slots[row] % kv.block_size;
    const float* keys = heads + int64_t(num_heads) * head_dim;
    const float* values = keys + int64_t(kv.num_kv_heads) * head_dim;
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      const int64_t slot_row = (block * kv.num_kv_heads + head) * kv.block_size + offset;
      store_row(keys + head * head_dim, head_dim, kv.type, kv.keys, slot_row);
      store_row(values + head * head_dim, head_dim, kv.type, kv.values, slot_row);
    }
  }
}

}  // namespace pagedd::cpu
