// The CPU's attention as C functions, for ctypes: the whole step on the calling thread, cut as for `num_threads`.
#include <vector>

#include "attention.h"
#include "rope_kv.h"

using namespace pagedd::cpu;

namespace {

// key_type, value_type: the numbers of their KvType
KvLayer kv_layer(uint8_t* keys, uint8_t* values, uint8_t* open_keys, int key_type, int value_type, int num_kv_heads,
                 int block_size, int head_dim) {
  return {keys, values, KvType(key_type), KvType(value_type), num_kv_heads, block_size, head_dim, open_keys};
}

}  // namespace

// Returns the number of items that the step was cut into.
extern "C" int attend(const float* query, float* output, int64_t stride, uint8_t* keys, uint8_t* values,
                      uint8_t* open_keys, int key_type, int value_type, int num_heads, int num_kv_heads, int block_size, int head_dim,
                      const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                      int64_t table_stride, const int32_t* open_tables, int64_t open_stride, int num_seqs, int num_threads, float scale, float soft_cap,
                      int sliding_window, int plan_window) {
  const KvLayer kv = kv_layer(keys, values, open_keys, key_type, value_type, num_kv_heads, block_size, head_dim);
  const AttentionBatch batch{query_starts, context_lens, block_tables, table_stride, num_seqs, open_tables, open_stride};
  AttentionPlan plan;
  plan.build(batch, num_heads, num_kv_heads, head_dim, num_threads, plan_window);
  // 0xff is NaN: what is read before it was written shows.
  std::vector<unsigned char> partial(plan.partial_bytes(), 0xff), scratch(plan.scratch_bytes_per_thread(), 0xff);
  for (int item = 0; item < plan.num_items(); ++item)
    attend_item(plan, batch, item, query, stride, kv, scale, soft_cap, sliding_window, output, stride, partial.data(),
                scratch.data());
  combine_rows(plan, 0, query_starts[num_seqs], output, stride, partial.data());
  return plan.num_items();
}

extern "C" void rope_and_write(float* qkv, int64_t stride, int64_t num_rows, int num_heads, const float* cos,
                               const float* sin, const float* query_norm, const float* key_norm, float eps,
                               const int64_t* slots, const int64_t* open_slots, uint8_t* keys, uint8_t* values,
                               uint8_t* open_keys, int key_type,
                               int value_type, int num_kv_heads, int block_size, int head_dim) {
  const KvLayer kv = kv_layer(keys, values, open_keys, key_type, value_type, num_kv_heads, block_size, head_dim);
  rope_and_write_kv(qkv, stride, 0, num_rows, num_heads, cos, sin, query_norm, key_norm, eps, slots, open_slots, kv);
}

extern "C" void close_full_blocks(const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                                  int64_t table_stride, const int32_t* open_tables, int64_t open_stride, int num_seqs,
                                  uint8_t* keys, uint8_t* values, uint8_t* open_keys, int key_type, int value_type,
                                  int num_kv_heads, int block_size, int head_dim) {
  const KvLayer kv = kv_layer(keys, values, open_keys, key_type, value_type, num_kv_heads, block_size, head_dim);
  const AttentionBatch batch{query_starts, context_lens, block_tables, table_stride, num_seqs, open_tables, open_stride};
  for (const FullBlock full : full_blocks(batch, block_size)) close_block(kv, full);
}
