// Causal attention over paged keys and values (PagedAttention, Kwon et al. 2023), as items that threads take in turn.
//
// Owns how a step's attention is cut into work, and the work. Opens no threads and allocates nothing but the plan's
// own tables. The arithmetic is in attention_tile.h and, for a few rows, in attention_few.h; the forms of the cache
// are in kv_form.h and kv_rows.h, its blocks in paged_rows.h; rows are written to it by rope_kv.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv_form.h"

namespace pagedd::cpu {

// The step's sequences, as in engine/batch.py.
struct AttentionBatch {
  const int32_t* query_starts;  // [num_seqs + 1]; rows [query_starts[i], query_starts[i + 1]) belong to sequence i
  const int32_t* context_lens;  // [num_seqs]; keys of sequence i; its rows are the last positions
  const int32_t* block_tables;  // [num_seqs, table_stride]; entries past the last block are never read
  int64_t table_stride;
  int num_seqs;
  // Of a cache with open keys: [num_seqs, open_stride], pages of a sequence's blocks from its first row's block on.
  const int32_t* open_tables;
  int64_t open_stride;

  int first_position(int seq) const { return context_lens[seq] - (query_starts[seq + 1] - query_starts[seq]); }
};

// One piece of work: some rows of one sequence, the query heads that share one KV head, and some of the keys.
struct AttentionItem {
  int seq, kv_head;
  int first_row, num_rows;  // rows of the batch
  int first_position;       // of the first row, in its sequence
  int key_begin, key_end;   // positions of the keys
  bool is_split;            // other items hold the rest of the keys
  size_t partial;           // where its result goes when it is split, in floats
  int64_t cost;
};

// Rows and a KV head whose keys were split: their results are sums over `num_pieces` partial ones.
struct SplitRows {
  int first_row, num_rows, kv_head, num_pieces;
  size_t partial;
};

// How a step's attention is cut. Made once a step and good for all of its layers; keeps its memory between steps.
class AttentionPlan {
 public:
  // Contexts are split only where there are too few items for `num_threads`. With one thread a row's result is the same
  // to the last bit, whatever else the step holds: nothing is split, and few rows are summed in the order of many.
  // sliding_window: the widest of the layers'; 0 if any of them has none.
  void build(const AttentionBatch& batch, int num_heads, int num_kv_heads, int head_dim, int num_threads,
             int sliding_window);

  // Items are in descending order of work: taken one at a time, threads end at about the same time.
  int num_items() const { return int(items_.size()); }
  size_t scratch_bytes_per_thread() const;
  size_t partial_bytes() const { return num_partials_ * sizeof(float); }

  const AttentionItem& item(int index) const { return items_[index]; }
  const std::vector<SplitRows>& splits() const { return splits_; }  // by first_row
  int group_size() const { return group_size_; }                    // query heads that share one KV head
  int head_dim() const { return head_dim_; }
  int max_rows() const { return max_rows_; }                        // of an item, times group_size
  int num_threads() const { return num_threads_; }
  bool is_repeatable() const { return num_threads_ == 1; }

 private:
  int group_size_ = 0, head_dim_ = 0, max_rows_ = 0, num_threads_ = 1;
  size_t num_partials_ = 0;
  std::vector<AttentionItem> items_;
  std::vector<SplitRows> splits_;
};

// Does one item; rows of an item that was split are complete only after `combine_rows`.
//   query, output: [num_tokens, stride] float32, the heads of a row contiguous [num_heads, head_dim]
//   scale: multiplies the dot products
//   soft_cap: scores s become soft_cap · tanh(s / soft_cap) before the softmax (Gemma 2); 0: none
//   sliding_window: this layer's; a row at position p sees keys p − sliding_window + 1 … p; 0: all up to p
//   partial: the plan's partial_bytes, shared by all threads; scratch: this thread's own
void attend_item(const AttentionPlan& plan, const AttentionBatch& batch, int item, const float* query,
                 int64_t query_stride, const KvLayer& kv, float scale, float soft_cap, int sliding_window,
                 float* output, int64_t output_stride, void* partial, void* scratch);

// Completes the rows [first_row, end_row); the threads must have met in between. Nothing to do for rows not split.
void combine_rows(const AttentionPlan& plan, int64_t first_row, int64_t end_row, float* output, int64_t output_stride,
                  const void* partial);

}  // namespace pagedd::cpu
