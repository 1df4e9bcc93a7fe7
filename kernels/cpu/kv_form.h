// The forms of a KV cache: where the rows of a block and head lie, and how many bytes they take.
//
// The same as kernels/kv_form.py and row_form.py, which specify the numbers. kv_rows.h reads the forms, kv_quantize.h
// writes them.
#pragma once

#include <cstdint>

namespace pagedd::cpu {

// Of rows; keys and values may have one each.
enum class KvType { kFloat32, kBFloat16, kInt8, kFp8, kInt4, kChannel4 };

constexpr int kRowsAtOnce = 16;  // attention reads so many rows at a time; in kChannel4 they are of one block
constexpr int kInt4Group = 32;  // dimensions that share a scale and an offset; a head's last group may be half

// Of one row of one head; head_dim: a multiple of 16. 64 bits wide, as addresses: in 32 they cost the inner loops of
// attention a fifth.
constexpr int64_t value_bytes(KvType type, int head_dim) {
  switch (type) {
    case KvType::kFloat32: return 4 * head_dim;
    case KvType::kBFloat16: return 2 * head_dim;
    case KvType::kInt4:
    case KvType::kChannel4: return head_dim / 2;
    default: return head_dim;
  }
}

// A bfloat16 a row; int4: scale and offset, bfloat16 each, a group.
constexpr int64_t scale_bytes(KvType type, int head_dim) {
  switch (type) {
    case KvType::kInt8:
    case KvType::kFp8: return 2;
    case KvType::kInt4: return 4 * ((head_dim + kInt4Group - 1) / kInt4Group);
    default: return 0;
  }
}

// kChannel4: a scale and an offset, bfloat16 each, a dimension, for all rows of a block.
constexpr int64_t block_scale_bytes(KvType type, int head_dim) { return type == KvType::kChannel4 ? 4 * head_dim : 0; }

// A record is what lies together: the rows of a block for one head, values first, then their scales. Quantized ones
// are padded to whole cache lines.
constexpr int64_t record_bytes(KvType type, int block_size, int head_dim) {
  const int64_t bytes = int64_t(block_size) * (value_bytes(type, head_dim) + scale_bytes(type, head_dim)) +
                        block_scale_bytes(type, head_dim);
  return type == KvType::kFloat32 || type == KvType::kBFloat16 ? bytes : (bytes + 63) / 64 * 64;
}

// A row, or the first of some that follow each other. `scales` leads to the block's where its rows share them, and
// nowhere where the form has none.
struct RowPointer {
  uint8_t* values;
  uint8_t* scales;
};

// One layer's cache. Offsets into it may exceed 32 bits.
struct KvLayer {
  uint8_t* keys;    // [num_blocks, num_kv_heads] records
  uint8_t* values;  // the same
  KvType key_type, value_type;
  int num_kv_heads, block_size, head_dim;  // head_dim: a multiple of 16
  // kChannel4: keys of blocks that are not full, [num_pages, num_kv_heads, block_size, head_dim] bfloat16. Blocks are
  // multiples of kRowsAtOnce then.
  uint8_t* open_keys;
};

// The row of position `offset` of a block, in `plane`, which is kv.keys or kv.values. `type` is the plane's, apart so
// that a compiler may know it.
inline RowPointer row_of(KvType type, const KvLayer& kv, uint8_t* plane, int64_t block, int kv_head, int offset) {
  const int64_t row_bytes = value_bytes(type, kv.head_dim);
  uint8_t* record = plane + (block * kv.num_kv_heads + kv_head) * record_bytes(type, kv.block_size, kv.head_dim);
  return {record + offset * row_bytes, record + kv.block_size * row_bytes + offset * scale_bytes(type, kv.head_dim)};
}

}  // namespace pagedd::cpu
