#include "rope_kv.h"

#include <cmath>
#include <cstring>

#include "kv_quantize.h"
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

void store_row(const float* x, int size, KvType type, RowPointer to) {
  if (type == KvType::kFloat32) {
    std::memcpy(to.values, x, size * sizeof(float));
  } else if (type == KvType::kBFloat16) {
    uint16_t* values = reinterpret_cast<uint16_t*>(to.values);
    for (int d = 0; d < size; ++d) values[d] = to_bfloat16(x[d]);
  } else {
    quantize_row(type, x, size, to);
  }
}

}  // namespace

void rope_and_write_kv(float* qkv, int64_t stride, int64_t first_row, int64_t end_row, int num_heads, const float* cos,
                       const float* sin, const float* query_norm, const float* key_norm, float eps,
                       const int64_t* slots, const int64_t* open_slots, const KvLayer& kv) {
  const int head_dim = kv.head_dim, half = head_dim / 2;
  for (int64_t row = first_row; row < end_row; ++row) {
    float* heads = qkv + row * stride;
    for (int head = 0; head < num_heads + kv.num_kv_heads; ++head) {
      float* x = heads + head * head_dim;
      const float* norm = head < num_heads ? query_norm : key_norm;
      if (norm) normalise(x, norm, head_dim, eps);
      rotate(x, cos + row * half, sin + row * half, half);
    }
    const int64_t block = slots[row] / kv.block_size;
    const int offset = int(slots[row] % kv.block_size);
    const bool is_open = kv.key_type == KvType::kChannel4;
    const float* keys = heads + int64_t(num_heads) * head_dim;
    const float* values = keys + int64_t(kv.num_kv_heads) * head_dim;
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      if (is_open)
        store_row(keys + head * head_dim, head_dim, KvType::kBFloat16,
                  row_of(KvType::kBFloat16, kv, kv.open_keys, open_slots[row] / kv.block_size, head, offset));
      else
        store_row(keys + head * head_dim, head_dim, kv.key_type,
                  row_of(kv.key_type, kv, kv.keys, block, head, offset));
      store_row(values + head * head_dim, head_dim, kv.value_type,
                row_of(kv.value_type, kv, kv.values, block, head, offset));
    }
  }
}

std::vector<FullBlock> full_blocks(const AttentionBatch& batch, int block_size) {
  std::vector<FullBlock> full;
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int first = batch.first_position(seq) / block_size;
    for (int block = first; block < batch.context_lens[seq] / block_size; ++block)
      full.push_back({batch.block_tables[seq * batch.table_stride + block],
                      batch.open_tables[seq * batch.open_stride + block - first]});
  }
  return full;
}

void close_block(const KvLayer& kv, FullBlock full) {
  for (int head = 0; head < kv.num_kv_heads; ++head) {
    const RowPointer keys = row_of(KvType::kBFloat16, kv, kv.open_keys, full.page, head, 0);
    quantize_channels(reinterpret_cast<const uint16_t*>(keys.values), kv.block_size, kv.head_dim,
                      row_of(KvType::kChannel4, kv, kv.keys, full.block, head, 0));
  }
}

}  // namespace pagedd::cpu
