// A whole forward pass of a Llama-family decoder over paged KV, in one parallel region.
//
// Owns the order of the operations and the scratch memory between them. Products are in linear.h, attention in
// attention.h. Knows no torch: bindings.cpp keeps the tensors alive that these pointers lead to.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "rope_kv.h"
#include "team.h"

namespace pagedd::cpu {

struct Shape {
  int hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
  float rms_norm_eps;

  int query_size() const { return num_heads * head_dim; }
  int qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

struct Layer {
  const float* attention_norm;  // [hidden_size]
  Linear qkv;                   // hidden_size → query, key and value heads
  const float* query_norm;      // [head_dim] or null
  const float* key_norm;
  Linear output;  // query_size → hidden_size
  const float* mlp_norm;
  Linear gate_up;  // hidden_size → 2 × intermediate_size; tiles of gate and up take turns
  Linear down;     // intermediate_size → hidden_size
  int sliding_window;  // 0: none
};

// One step. Rows are tokens.
struct Batch {
  int num_tokens;
  const int64_t* token_ids;  // [num_tokens]
  const float* cos;          // [num_tokens, head_dim / 2]
  const float* sin;
  const int64_t* slots;  // [num_tokens]: block × block_size + offset
  const int64_t* open_slots;  // as in rope_kv.h
  AttentionBatch attention;
  int num_logits_rows;
  const int64_t* logits_rows;
};

// Of each layer the keys, then the values: [num_blocks, num_kv_heads] records each.
struct KvCache {
  uint8_t* data;
  KvType key_type, value_type;
  int64_t num_blocks;
  int block_size;
  uint8_t* open_keys;  // [num_layers, num_pages] as in KvLayer
  int64_t num_pages;
};

class Decoder {
 public:
  Decoder(Shape shape, Linear embedding, const float* final_norm, Linear head)
      : shape_(shape), embedding_(embedding), final_norm_(final_norm), head_(head) {}

  void add_layer(const Layer& layer) { layers_.push_back(layer); }

  // Writes the KV of every token and logits [num_logits_rows, head.out_features].
  void forward(const Batch& batch, const KvCache& kv, int num_threads, float* logits);

  size_t scratch_bytes() const { return memory_bytes_; }

 private:
  struct Scratch;

  int widest_window() const;  // 0 when a layer has none
  void run_layer(const Layer& layer, bool is_last, const KvLayer& kv, const Batch& batch,
                 const std::vector<FullBlock>& full, Scratch& scratch, Member& member);

  Shape shape_;
  Linear embedding_;
  const float* final_norm_;
  Linear head_;
  std::vector<Layer> layers_;
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint8_t, Free> memory_;  // of Scratch; grows to the largest step seen
  size_t memory_bytes_ = 0;
  AttentionPlan plan_;
};

}  // namespace pagedd::cpu
