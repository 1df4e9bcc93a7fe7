#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector_math.h"

namespace pagedd::cpu {
namespace {

constexpr float kOne = 0x1p40f;  // weight of the most likely token
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// How far below the highest logit, in temperatures, tokens are looked for, one after the other; the last is all.
constexpr float kDistances[] = {4, 10, kInfinity};
constexpr int kBlock = 1024;     // tokens whose weights are summed before a place among them is looked for
constexpr int kFloatSums = 256;  // terms that are added as floats before a double takes them

// Sixteen logits from `begin` on; −∞ past the end.
inline Vec load(const float* logits, int vocab_size, int begin) {
  if (begin + kLanes <= vocab_size) return Vec::load(logits + begin);
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -kInfinity);
  std::copy(logits + begin, logits + vocab_size, lanes);
  return Vec::load(lanes);
}

float highest_of(const float* logits, int vocab_size) {
  Vec highest = Vec::all(-kInfinity);
  for (int i = 0; i < vocab_size; i += kLanes) highest = max(load(logits, vocab_size, i), highest);
  return highest.max();
}

// 2⁴⁰ exp((logit − highest) / temperature), which 64 bits take after truncation.
void weigh(const float* logits, int vocab_size, float highest, float temperature, std::vector<float>& weights) {
  weights.resize((vocab_size + kLanes - 1) / kLanes * kLanes);
  // The highest is subtracted before dividing, so a tiny temperature gives 0 and −∞, never +∞ or NaN.
  const Vec divisor = Vec::all(std::max(temperature, std::numeric_limits<float>::min()));
  for (int i = 0; i < vocab_size; i += kLanes) {
    const Vec relative = (load(logits, vocab_size, i) - Vec::all(highest)) / divisor;
    (exp(min(relative, Vec::zero())) * Vec::all(kOne)).store(weights.data() + i);
  }
}

bool is_better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}
bool is_earlier(const Candidate& a, const Candidate& b) { return a.id < b.id; }

int64_t sum_of(const Candidate* begin, const Candidate* end) {
  int64_t sum = 0;
  for (; begin != end; ++begin) sum += begin->weight;
  return sum;
}

// Moves to the front, in `order`, the fewest that hold `wanted` together, and returns how many they are: all of them if
// they hold less. Halves what is in question, so it takes a time linear in `count`, which is at least 1.
template <class Order>
int64_t fewest_that_hold(int64_t wanted, Candidate* candidates, int64_t count, Order order) {
  int64_t begin = 0, end = count;  // those before `begin` are in, those from `end` on are out
  while (end - begin > 1) {
    const int64_t middle = begin + (end - begin) / 2;
    std::nth_element(candidates + begin, candidates + middle, candidates + end, order);
    const int64_t held = sum_of(candidates + begin, candidates + middle);
    if (held >= wanted) {
      end = middle;
    } else {
      wanted -= held;
      begin = middle;
    }
  }
  return end;
}

// Tokens whose logit is `least` or more. None is NaN, so they have an order.
void gather(const float* logits, int vocab_size, float least, std::vector<Candidate>& candidates) {
  candidates.clear();
  for (int begin = 0; begin < vocab_size; begin += kLanes) {
    // Most registers hold none.
    if (!(load(logits, vocab_size, begin).max() >= least)) continue;
    for (int id = begin; id < std::min(begin + kLanes, vocab_size); ++id)
      if (logits[id] >= least) candidates.push_back({logits[id], id, 0});
  }
}

int64_t total_of(const std::vector<float>& weights, int64_t floor, size_t begin, size_t end) {
  int64_t total = 0;
  for (size_t i = begin; i < end; ++i) {
    const int64_t weight = int64_t(weights[i]);
    total += weight >= floor ? weight : 0;
  }
  return total;
}

int64_t target_of(double draw, int64_t total) { return std::min(int64_t(draw * double(total)), total - 1); }

// Step 10 over the whole vocabulary, less the tokens below `floor`.
int64_t draw_from_all(const std::vector<float>& weights, int64_t floor, double draw, int vocab_size) {
  std::vector<int64_t> sums;
  int64_t total = 0;
  for (size_t begin = 0; begin < weights.size(); begin += kBlock) {
    sums.push_back(total_of(weights, floor, begin, std::min(begin + kBlock, weights.size())));
    total += sums.back();
  }
  int64_t left = target_of(draw, total);
  size_t block = 0;
  for (; block + 1 < sums.size() && sums[block] <= left; ++block) left -= sums[block];
  for (int id = int(block) * kBlock; id < vocab_size; ++id) {
    const int64_t weight = int64_t(weights[id]);
    if (weight < floor) continue;
    left -= weight;
    if (left < 0) return id;
  }
  return vocab_size - 1;
}

// Steps 7 and 8: the tokens that are kept, with their weights, in any order.
void keep_best(const float* logits, int vocab_size, float highest, const Choice& choice, SamplingScratch& scratch) {
  auto& candidates = scratch.candidates;
  const bool is_limited = choice.limit < vocab_size;
  int64_t total = is_limited ? 0 : total_of(scratch.weights, 0, 0, scratch.weights.size());
  // A share of 1 is the exact total: past 2⁵³ the product would be rounded.
  const auto share_of = [&](int64_t all) {
    return choice.share < 1 ? int64_t(std::ceil(choice.share * double(all))) : all;
  };
  for (const float distance : kDistances) {
    gather(logits, vocab_size, highest - distance * choice.temperature, candidates);
    for (Candidate& candidate : candidates) candidate.weight = int64_t(scratch.weights[candidate.id]);
    const int64_t held = sum_of(candidates.data(), candidates.data() + candidates.size());
    if (is_limited ? int64_t(candidates.size()) >= choice.limit : held >= share_of(total)) break;
  }
  if (candidates.empty()) return;
  if (choice.limit < int64_t(candidates.size())) {
    std::nth_element(candidates.begin(), candidates.begin() + choice.limit, candidates.end(), is_better);
    candidates.resize(choice.limit);
  }
  if (is_limited) total = sum_of(candidates.data(), candidates.data() + candidates.size());
  if (choice.share < 1)
    candidates.resize(fewest_that_hold(share_of(total), candidates.data(), candidates.size(), is_better));
}

}  // namespace

int64_t draw_token(const float* logits, int vocab_size, const Choice& choice, SamplingScratch& scratch) {
  const float highest = highest_of(logits, vocab_size);
  weigh(logits, vocab_size, highest, choice.temperature, scratch.weights);
  if (choice.limit >= vocab_size && choice.share >= 1)
    return draw_from_all(scratch.weights, choice.floor, choice.draw, vocab_size);
  keep_best(logits, vocab_size, highest, choice, scratch);
  auto& kept = scratch.candidates;
  std::erase_if(kept, [&](const Candidate& candidate) { return candidate.weight < choice.floor; });
  if (kept.empty()) return 0;
  const int64_t target = target_of(choice.draw, sum_of(kept.data(), kept.data() + kept.size()));
  const int64_t count = fewest_that_hold(target + 1, kept.data(), kept.size(), is_earlier);
  return std::max_element(kept.begin(), kept.begin() + count, is_earlier)->id;
}

float best_tokens(const float* logits, int vocab_size, int width, int64_t* ids, SamplingScratch& scratch) {
  const float highest = highest_of(logits, vocab_size);
  auto& best = scratch.candidates;
  if (width > 0) {
    for (const float distance : kDistances) {
      gather(logits, vocab_size, highest - distance, best);
      if (int(best.size()) >= width) break;
    }
    const int count = std::min(int(best.size()), width);
    std::partial_sort(best.begin(), best.begin() + count, best.end(), is_better);
    for (int i = 0; i < width; ++i) ids[i] = i < count ? best[i].id : 0;
  }
  double sum = 0;
  for (int begin = 0; begin < vocab_size; begin += kFloatSums * kLanes) {
    Vec part = Vec::zero();
    for (int i = begin; i < std::min(begin + kFloatSums * kLanes, vocab_size); i += kLanes)
      part = part + exp(load(logits, vocab_size, i) - Vec::all(highest));
    sum += part.sum();
  }
  return highest + float(std::log(sum));
}

}  // namespace pagedd::cpu
