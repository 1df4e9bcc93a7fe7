// What lies between the product that makes query, key and value, and attention: norms of heads, rotation, the KV write.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace pagedd::cpu {

// For the rows [first_row, end_row): normalises each query and key head (Qwen 3), rotates it in place (Su et al. 2021,
// in the half-split order of transformers) and stores key and value in the row's slot.
//   qkv: [num_tokens, stride] float32; a row is num_heads query heads, then the key heads, then the value heads
//   cos, sin: [num_tokens, head_dim / 2]
//   query_norm, key_norm: [head_dim]; null where the model has none
//   slots: [num_tokens], block × block_size + offset
//   open_slots: the same of pages, where keys go while their block is open; of a cache without open keys, null
void rope_and_write_kv(float* qkv, int64_t stride, int64_t first_row, int64_t end_row, int num_heads, const float* cos,
                       const float* sin, const float* query_norm, const float* key_norm, float eps,
                       const int64_t* slots, const int64_t* open_slots, const KvLayer& kv);

// A block that a step fills, and its page.
struct FullBlock {
  int32_t block, page;
};

// Those of a batch whose cache has open keys.
std::vector<FullBlock> full_blocks(const AttentionBatch& batch, int block_size);

// Quantizes the keys of a full block out of its page.
void close_block(const KvLayer& kv, FullBlock full);

}  // namespace pagedd::cpu
