// One row of logits: the token that is drawn from it, and its best tokens for log-probabilities.
//
// Owns the arithmetic of steps 6 to 10 of engine/sampler.py, which says what they mean. Knows no batch and no thread.
// Most rows need few of the best: those within some distance of the highest are gathered, further ones only if these do
// not settle the row, so that a vocabulary is never sorted. A row with a NaN or an infinity gives any token in range.
#pragma once

#include <cstdint>
#include <vector>

namespace pagedd::cpu {

struct Choice {
  float temperature;
  int64_t limit;  // top_k, at least 1; the vocabulary's size or more keeps all
  double share;   // top_p; 1 or more keeps all
  int64_t floor;  // min_p as a weight
  double draw;    // in [0, 1)
};

struct Candidate {
  float logit;
  int32_t id;
  int64_t weight;
};

// What a thread keeps from row to row.
struct SamplingScratch {
  std::vector<float> weights;
  std::vector<Candidate> candidates;
};

int64_t draw_token(const float* logits, int vocab_size, const Choice& choice, SamplingScratch& scratch);

// The `width` highest, highest first and lower ids first among equals, into `ids`; 0 where there are not so many numbers.
// Returns log Σ exp.
float best_tokens(const float* logits, int vocab_size, int width, int64_t* ids, SamplingScratch& scratch);

}  // namespace pagedd::cpu
