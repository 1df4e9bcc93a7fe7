// Where the keys and values of a sequence lie in the blocks of the cache, read 16 at a time.
#pragma once

#include <algorithm>

#include "attention.h"
#include "vector_math.h"

namespace pagedd::cpu {

// Keys of a sequence, for one KV head.
struct KeyRange {
  const int32_t* table;  // the sequence's blocks
  int kv_head, begin, end;
};

// One plane, keys or values, of a range. `next` is the range that this thread is likely to turn to then.
template <class Element>
class PagedRows {
 public:
  PagedRows(const void* plane, const KvLayer& kv, const KeyRange& range, const KeyRange& next, Element* gathered)
      : plane_(static_cast<const Element*>(plane)), kv_(kv), range_(range), next_(next), gathered_(gathered) {}

  // The rows of positions first … first + 15, head_dim apart; `first` is a multiple of 16. Where they do not lie
  // together, or are not all of the range, they are gathered, zero outside it: what is multiplied by a weight of zero
  // must be finite. Good until the next call.
  const Element* at(int first) const {
    if (lies_together() && first >= range_.begin && first + kLanes <= range_.end) return row(range_, first);
    Element* to = gathered_;
    for (int position = first; position < first + kLanes; ++position, to += kv_.head_dim) {
      if (position < range_.begin || position >= range_.end)
        std::fill_n(to, kv_.head_dim, Element(0));
      else
        std::copy_n(row(range_, position), kv_.head_dim, to);
    }
    return gathered_;
  }

  // What to fetch while those at `first` are used: the rows kFetchAhead positions on, in the next range past the end.
  const Element* ahead_of(int first) const {
    if (!lies_together()) return gathered_;
    const int position = first + kFetchAhead;
    if (position < range_.end) return row(range_, position);
    const int past = position - round_up(range_.end), last = round_up(next_.end) - kLanes;
    return row(next_, std::min(next_.begin / kLanes * kLanes + past, last));
  }

 private:
  // Memory takes about as long to answer as a core takes for so many keys.
  static constexpr int kFetchAhead = 4 * kLanes;

  static int round_up(int position) { return (position + kLanes - 1) / kLanes * kLanes; }

  bool lies_together() const { return kv_.block_size % kLanes == 0; }

  const Element* row(const KeyRange& range, int position) const {
    const int64_t block = range.table[position / kv_.block_size], offset = position % kv_.block_size;
    return plane_ + ((block * kv_.num_kv_heads + range.kv_head) * kv_.block_size + offset) * kv_.head_dim;
  }

  const Element* plane_;
  const KvLayer& kv_;
  KeyRange range_, next_;
  Element* gathered_;
};

}  // namespace pagedd::cpu
