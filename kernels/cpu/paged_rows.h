// Where the keys and values of a sequence lie in the blocks of the cache, read 16 at a time.
#pragma once

#include <algorithm>

#include "kv_form.h"
#include "vector_math.h"

namespace pagedd::cpu {

// Keys of a sequence, for one KV head.
struct KeyRange {
  const int32_t* table;  // the sequence's blocks, from first_block on
  int kv_head, begin, end;
  int first_block;
};

// Bytes in which 16 rows can be gathered, whatever their form.
constexpr size_t gathered_bytes(int head_dim) { return size_t(kLanes) * head_dim * sizeof(float); }

// One plane, keys or values, of a range. `next` is the range that this thread is likely to turn to then.
template <KvType kType>
class PagedRows {
 public:
  // gathered: gathered_bytes.
  PagedRows(uint8_t* plane, const KvLayer& kv, const KeyRange& range, const KeyRange& next, uint8_t* gathered)
      : plane_(plane), kv_(kv), range_(range), next_(next), gathered_(gathered) {}

  // The rows of positions first … first + 15; `first` is a multiple of 16. Where they do not lie together, or are not
  // all of the range, they are gathered, zero outside it: what is multiplied by a weight of zero must be finite. Good
  // until the next call.
  RowPointer at(int first) const {
    // Rows that share their block's scales stay with them; of keys, what is not of the range is masked.
    if (kType == KvType::kChannel4 || is_in_place(first)) return row(range_, first);
    gather(first, value_bytes(kType, kv_.head_dim), &RowPointer::values, gathered_);
    return {gathered_, scales_at(first)};
  }

  // Only the scales of the same rows.
  uint8_t* scales_at(int first) const {
    if (is_in_place(first)) return row(range_, first).scales;
    uint8_t* scales = gathered_ + kLanes * value_bytes(kType, kv_.head_dim);
    gather(first, scale_bytes(kType, kv_.head_dim), &RowPointer::scales, scales);
    return scales;
  }

  // What to fetch while those at `first` are used: the rows kFetchAhead positions on, in the next range past the end.
  RowPointer ahead_of(int first) const {
    if (!lies_together()) return {gathered_, gathered_};
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

  bool is_in_place(int first) const {
    return lies_together() && first >= range_.begin && first + kLanes <= range_.end;
  }

  void gather(int first, int64_t row_bytes, uint8_t* RowPointer::* part, uint8_t* to) const {
    for (int position = first; position < first + kLanes; ++position, to += row_bytes) {
      if (position < range_.begin || position >= range_.end)
        std::fill_n(to, row_bytes, uint8_t(0));
      else
        std::copy_n(row(range_, position).*part, row_bytes, to);
    }
  }

  RowPointer row(const KeyRange& range, int position) const {
    const int64_t block = range.table[position / kv_.block_size - range.first_block];
    return row_of(kType, kv_, plane_, block, range.kv_head, position % kv_.block_size);
  }

  uint8_t* plane_;
  const KvLayer& kv_;
  KeyRange range_, next_;
  uint8_t* gathered_;
};

}  // namespace pagedd::cpu
