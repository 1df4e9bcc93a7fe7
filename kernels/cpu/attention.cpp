#include "attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "attention_few.h"
#include "paged_rows.h"

namespace pagedd::cpu {
namespace {

constexpr int kMaxItemRows = 192;  // query rows × heads of a group: their words and sums stay in the L2 cache
constexpr int64_t kTileCost = 8;   // packing a key costs about as much as so many rows' use of it
constexpr int kItemsPerThread = 2;

constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

using AttendTile = void (*)(const QueryRows&, int, const KeyTile&, const Scoring&, bool);

// [rows at once − 1][vectors of keys − 1]
template <class Math, bool kKeysAreScaled, bool kValuesAreScaled>
constexpr auto kAttendTile = []<int... kRows>(std::integer_sequence<int, kRows...>) {
  return std::array{std::array<AttendTile, kTileVecs>{
      attend_tile<Math, kKeysAreScaled, kValuesAreScaled, kRows + 1, 1>,
      attend_tile<Math, kKeysAreScaled, kValuesAreScaled, kRows + 1, 2>,
      attend_tile<Math, kKeysAreScaled, kValuesAreScaled, kRows + 1, 3>,
      attend_tile<Math, kKeysAreScaled, kValuesAreScaled, kRows + 1, 4>}...};
}(std::make_integer_sequence<int, kMaxRowsAtOnce>());

// Layout of a thread's scratch, in floats.
struct ScratchLayout {
  size_t query, weighted, sums, maxima, keys, values, gathered, total;

  ScratchLayout(size_t num_rows, size_t head_dim) {
    const size_t padded_rows = (num_rows + kLanes - 1) / kLanes * kLanes;
    query = 0;
    weighted = query + num_rows * head_dim;
    sums = weighted + num_rows * head_dim;
    maxima = sums + num_rows * kLanes;
    keys = maxima + padded_rows;
    values = keys + kTileKeys * head_dim;
    gathered = values + kTileKeys * head_dim;
    total = gathered + gathered_bytes(int(head_dim)) / sizeof(float);
  }
};

// How much the rows [first_row, end_row) see of a tile, the keys [first, end).
struct Visibility {
  int num_vecs;     // 16 keys each, from the first on; beyond them they see none
  bool is_partial;  // some row does not see some key of those

  Visibility(const QueryRows& rows, int first_row, int end_row, int first, int end, const Scoring& scoring) {
    const int first_position = rows.position(first_row), last_position = rows.position(end_row - 1);
    const int window_begin = scoring.sliding_window ? first_position - scoring.sliding_window + 1 : 0;
    const int visible_end = std::min(end, scoring.seen_end(last_position));
    num_vecs = visible_end <= first || window_begin >= end ? 0 : divide_up(visible_end - first, kLanes);
    is_partial = first + num_vecs * kLanes > std::min(end, scoring.seen_end(first_position)) ||
                 window_begin + last_position - first_position > first;
  }
};

template <class KeyRows, class ValueRows>
void attend_packed(const QueryRows& rows, int num_rows, const PagedRows<KeyRows::kType>& keys,
                   const PagedRows<ValueRows::kType>& values, int first, int end, const Scoring& scoring,
                   float* key_words, float* value_words) {
  using Math = typename KeyRows::Math;
  alignas(64) float key_scales[kTileKeys], value_scales[kTileKeys];
  const KeyTile tile{key_words, value_words, key_scales, value_scales, first, end};
  for (int key = first; key < end; key += kLanes) {
    const int k = key - first;
    const RowPointer key_rows = keys.at(key);
    pack_keys<KeyRows>(key_rows, keys.ahead_of(key), rows.head_dim, kTileKeys, key_words + k);
    if constexpr (KeyRows::kIsScaled) KeyRows::scales(key_rows.scales).store(key_scales + k);
    const RowPointer value_rows = values.at(key);
    pack_values<ValueRows>(value_rows, values.ahead_of(key), rows.head_dim,
                           value_words + k / Math::kValuesPerWord * rows.head_dim);
    if constexpr (ValueRows::kIsScaled) ValueRows::scales(value_rows.scales).store(value_scales + k);
  }
  constexpr auto& kAttend = kAttendTile<Math, KeyRows::kIsScaled, ValueRows::kIsScaled>;
  const int num_chunks = divide_up(num_rows, kMaxRowsAtOnce);
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const int row = chunk * num_rows / num_chunks, stop = (chunk + 1) * num_rows / num_chunks;
    const Visibility visible(rows, row, stop, first, end, scoring);
    if (visible.num_vecs > 0)
      kAttend[stop - row - 1][visible.num_vecs - 1](rows, row, tile, scoring, visible.is_partial);
  }
}

template <class KeyRows, class ValueRows, int kRows>
void attend_few(const QueryRows& rows, const PagedRows<KeyRows::kType>& keys,
                const PagedRows<ValueRows::kType>& values, int first, int end, const Scoring& scoring) {
  using Math = typename KeyRows::Math;
  const bool is_partial = first + kTileKeys > end || Visibility(rows, 0, kRows, first, end, scoring).is_partial;
  alignas(64) float scores[kRows * kTileKeys], value_scales[kTileKeys];
  for (int key = first; key < end; key += kLanes) {
    multiply_sixteen<KeyRows, kRows>(rows.query, keys.at(key), keys.ahead_of(key), rows.head_dim,
                                     scores + (key - first));
    if constexpr (ValueRows::kIsScaled) ValueRows::scales(values.scales_at(key)).store(value_scales + (key - first));
  }
  weigh_rows<Math, ValueRows::kIsScaled, kTileVecs>(rows, 0, kRows, first, end, scoring, is_partial, value_scales,
                                                    scores);
  for (int key = first; key < end; key += kLanes)
    add_sixteen<ValueRows, kRows>(scores + (key - first) / Math::kValuesPerWord, values.at(key), values.ahead_of(key),
                                  rows.head_dim, rows.weighted);
}

// The keys [start, end), a tile at a time, against all rows.
template <class KeyRows, class ValueRows>
void attend_tiles(const QueryRows& rows, int num_rows, bool is_repeatable, const PagedRows<KeyRows::kType>& keys,
                  const PagedRows<ValueRows::kType>& values, int start, int end_key, const Scoring& scoring,
                  float* memory, const ScratchLayout& layout) {
  for (int first = start; first < end_key; first += kTileKeys) {
    const int end = std::min(first + kTileKeys, end_key);
    switch (is_repeatable ? 0 : num_rows) {
      case 1: attend_few<KeyRows, ValueRows, 1>(rows, keys, values, first, end, scoring); break;
      case 2: attend_few<KeyRows, ValueRows, 2>(rows, keys, values, first, end, scoring); break;
      case 3: attend_few<KeyRows, ValueRows, 3>(rows, keys, values, first, end, scoring); break;
      case 4: attend_few<KeyRows, ValueRows, 4>(rows, keys, values, first, end, scoring); break;
      default:
        attend_packed<KeyRows, ValueRows>(rows, num_rows, keys, values, first, end, scoring, memory + layout.keys,
                                          memory + layout.values);
    }
  }
}

// All keys of the range against all rows.
template <class KeyRows, class ValueRows>
void attend_keys(const QueryRows& rows, int num_rows, bool is_repeatable, const KvLayer& kv, const KeyRange& range,
                 const KeyRange& next, const Scoring& scoring, float* memory, const ScratchLayout& layout) {
  uint8_t* gathered = reinterpret_cast<uint8_t*>(memory + layout.gathered);
  const PagedRows<KeyRows::kType> keys(kv.keys, kv, range, next, gathered);
  const PagedRows<ValueRows::kType> values(kv.values, kv, range, next, gathered);
  // To be repeatable, tiles begin at the same keys for every row, wherever a window begins.
  const int start = is_repeatable ? range.begin / kTileKeys * kTileKeys : range.begin / kLanes * kLanes;
  attend_tiles<KeyRows, ValueRows>(rows, num_rows, is_repeatable, keys, values, start, range.end, scoring, memory,
                                   layout);
}

// Rows see the keys of their own block in its page, and those before as they were quantized.
void attend_open_and_closed(const QueryRows& rows, int num_rows, bool is_repeatable, const KvLayer& kv,
                            const KeyRange& range, const KeyRange& next, const KeyRange& open, Scoring scoring,
                            float* memory, const ScratchLayout& layout) {
  const int block_size = kv.block_size, last_position = rows.position(num_rows - 1);
  KeyRange closed = range;
  closed.end = std::min(range.end, last_position / block_size * block_size);
  scoring.closed_block_size = block_size;
  if (closed.begin < closed.end)
    attend_keys<Channel4Rows, Int4Rows>(rows, num_rows, is_repeatable, kv, closed, next, scoring, memory, layout);

  scoring.closed_block_size = 0;
  uint8_t* gathered = reinterpret_cast<uint8_t*>(memory + layout.gathered);
  for (int row = 0; row < num_rows;) {
    const int position = rows.position(row), block_begin = position / block_size * block_size;
    const int count = std::min(num_rows - row, (block_begin + block_size - position) * rows.group_size);
    const QueryRows own{rows.query + size_t(row) * rows.num_words, rows.weighted + size_t(row) * rows.head_dim,
                        rows.sums + row * kLanes, rows.maxima + row, rows.num_words, rows.head_dim,
                        rows.group_size, position};
    KeyRange pages = open, values_range = range;
    pages.begin = values_range.begin = std::max(range.begin, block_begin);
    pages.end = values_range.end = std::min(range.end, block_begin + block_size);
    if (pages.begin < pages.end) {
      const PagedRows<KvType::kBFloat16> keys(kv.open_keys, kv, pages, pages, gathered);
      const PagedRows<KvType::kInt4> values(kv.values, kv, values_range, values_range, gathered);
      attend_tiles<BFloat16Rows, Int4Rows>(own, count, is_repeatable, keys, values, block_begin, pages.end, scoring,
                                           memory, layout);
    }
    row += count;
  }
}

using AttendKeys = decltype(&attend_keys<Float32Rows, Float32Rows>);

// The pairs of forms that kernels/kv_form.py names.
AttendKeys attend_keys_of(const KvLayer& kv) {
  switch (kv.key_type) {
    case KvType::kBFloat16: return attend_keys<BFloat16Rows, BFloat16Rows>;
    case KvType::kInt8:
      return kv.value_type == KvType::kInt4 ? attend_keys<Int8Rows, Int4Rows> : attend_keys<Int8Rows, Int8Rows>;
    case KvType::kFp8: return attend_keys<Fp8Rows, Fp8Rows>;
    default: return attend_keys<Float32Rows, Float32Rows>;
  }
}

// A row of a partial result: weighted values, then the reference and the sum of weights.
int partial_stride(int head_dim) { return head_dim + kLanes; }

}  // namespace

size_t AttentionPlan::scratch_bytes_per_thread() const {
  return ScratchLayout(max_rows_, head_dim_).total * sizeof(float);
}

void AttentionPlan::build(const AttentionBatch& batch, int num_heads, int num_kv_heads, int head_dim, int num_threads,
                          int sliding_window) {
  group_size_ = num_heads / num_kv_heads;
  head_dim_ = head_dim;
  num_threads_ = num_threads;
  max_rows_ = 0;
  num_partials_ = 0;
  items_.clear();
  splits_.clear();

  // Rows first, all keys of each.
  const int tile_rows = std::max(1, kMaxItemRows / group_size_);
  int64_t total_cost = 0;
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int row_begin = batch.query_starts[seq], row_end = batch.query_starts[seq + 1];
    for (int row = row_begin; row < row_end; row += tile_rows) {
      const int num_rows = std::min(tile_rows, row_end - row);
      const int position = batch.context_lens[seq] - (row_end - row);
      const int begin = sliding_window ? std::max(0, position - sliding_window + 1) : 0;
      const int end = position + num_rows;
      const int64_t cost = int64_t(end - begin) * (num_rows * group_size_ + kTileCost);
      for (int kv_head = 0; kv_head < num_kv_heads; ++kv_head)
        items_.push_back({seq, kv_head, row, num_rows, position, begin, end, false, 0, cost});
      total_cost += cost * num_kv_heads;
      max_rows_ = std::max(max_rows_, num_rows * group_size_);
    }
  }

  // Then the keys of items that are more than a thread's fair share of the step.
  const int num_whole = int(items_.size());
  const bool is_small = num_whole < 4 * kItemsPerThread * num_threads;
  const int multiple = is_small ? num_threads / std::gcd(num_whole, num_threads) : 1;
  const int64_t fair_cost = total_cost / (kItemsPerThread * num_threads) + 1;
  for (int index = 0; index < num_whole && num_threads > 1; ++index) {
    const AttentionItem whole = items_[index];
    const int first_granule = whole.key_begin / kLanes;
    const int num_granules = divide_up(whole.key_end, kLanes) - first_granule;
    const int wanted = divide_up(int((whole.cost + fair_cost - 1) / fair_cost), multiple) * multiple;
    const int num_pieces = std::min(wanted, num_granules / (kTileVecs / 2));
    if (num_pieces < 2) continue;
    const size_t piece_size = size_t(whole.num_rows) * group_size_ * partial_stride(head_dim);
    splits_.push_back({whole.first_row, whole.num_rows, whole.kv_head, num_pieces, num_partials_});
    for (int piece = 0; piece < num_pieces; ++piece) {
      AttentionItem part = whole;
      const auto edge = [&](int i) { return (first_granule + i * num_granules / num_pieces) * kLanes; };
      part.key_begin = std::max(whole.key_begin, edge(piece));
      part.key_end = std::min(whole.key_end, edge(piece + 1));
      part.is_split = true;
      part.partial = num_partials_ + piece * piece_size;
      part.cost = whole.cost * (part.key_end - part.key_begin) / (whole.key_end - whole.key_begin);
      piece == 0 ? items_[index] = part : items_.emplace_back(part);
    }
    num_partials_ += num_pieces * piece_size;
  }
  std::stable_sort(items_.begin(), items_.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

void attend_item(const AttentionPlan& plan, const AttentionBatch& batch, int index, const float* query,
                 int64_t query_stride, const KvLayer& kv, float scale, float soft_cap, int sliding_window,
                 float* output, int64_t output_stride, void* partial, void* scratch) {
  const AttentionItem& item = plan.item(index);
  const int group_size = plan.group_size(), head_dim = plan.head_dim();
  const int num_rows = item.num_rows * group_size;
  const ScratchLayout layout(plan.max_rows(), head_dim);
  float* memory = static_cast<float*>(scratch);
  const bool is_float = kv.key_type == KvType::kFloat32;
  const int values_per_word = is_float ? 1 : NarrowMath::kValuesPerWord;
  const QueryRows rows{memory + layout.query,  memory + layout.weighted, memory + layout.sums,
                       memory + layout.maxima, head_dim / values_per_word, head_dim,
                       group_size,             item.first_position};
  for (int row = 0; row < num_rows; ++row) {
    const float* from = query + (item.first_row + row / group_size) * query_stride +
                        (item.kv_head * group_size + row % group_size) * head_dim;
    float* to = rows.query + row * rows.num_words;
    is_float ? Float32Math::make_words(from, head_dim, to) : NarrowMath::make_words(from, head_dim, to);
  }
  std::fill_n(rows.weighted, num_rows * head_dim, 0.0f);
  std::fill_n(rows.sums, num_rows * kLanes, 0.0f);
  std::fill_n(rows.maxima, num_rows, kNothingSeen);

  constexpr float kLog2E = 1.44269504088896341f;
  const Scoring scoring{(soft_cap ? soft_cap : scale) * kLog2E, soft_cap ? scale / soft_cap : 0.0f, sliding_window, 0};
  const auto range_of = [&](const AttentionItem& some) -> KeyRange {
    // The plan's window may be wider than this layer's.
    const int first = sliding_window ? some.first_position - sliding_window + 1 : 0;
    return {batch.block_tables + some.seq * batch.table_stride, some.kv_head, std::max(some.key_begin, first),
            some.key_end, 0};
  };
  const AttentionItem& next = plan.item(std::min(index + plan.num_threads(), plan.num_items() - 1));
  const KeyRange range = range_of(item), next_range = range_of(next);
  if (kv.key_type == KvType::kChannel4) {
    const KeyRange open{batch.open_tables + item.seq * batch.open_stride, item.kv_head, 0, 0,
                        batch.first_position(item.seq) / kv.block_size};
    attend_open_and_closed(rows, num_rows, plan.is_repeatable(), kv, range, next_range, open, scoring, memory, layout);
  } else {
    attend_keys_of(kv)(rows, num_rows, plan.is_repeatable(), kv, range, next_range, scoring, memory, layout);
  }

  for (int row = 0; row < num_rows; ++row) {
    const float sum = Vec::load(rows.sums + row * kLanes).sum();
    const float* weighted = rows.weighted + row * head_dim;
    if (item.is_split) {
      float* to = static_cast<float*>(partial) + item.partial + size_t(row) * partial_stride(head_dim);
      std::copy_n(weighted, head_dim, to);
      to[head_dim] = rows.maxima[row];
      to[head_dim + 1] = sum;
      continue;
    }
    float* to = output + (item.first_row + row / group_size) * output_stride +
                (item.kv_head * group_size + row % group_size) * head_dim;
    const Vec factor = Vec::all(1.0f / sum);
    for (int d = 0; d < head_dim; d += kLanes) (Vec::load(weighted + d) * factor).store(to + d);
  }
}

void combine_rows(const AttentionPlan& plan, int64_t first_row, int64_t end_row, float* output, int64_t output_stride,
                  const void* partial) {
  const int group_size = plan.group_size(), head_dim = plan.head_dim(), stride = partial_stride(head_dim);
  const std::vector<SplitRows>& splits = plan.splits();
  auto split = std::partition_point(splits.begin(), splits.end(), [&](const SplitRows& rows) {
    return rows.first_row + rows.num_rows <= first_row;
  });
  for (; split != splits.end() && split->first_row < end_row; ++split) {
    const size_t piece_stride = size_t(split->num_rows) * group_size * stride;
    const int row_begin = int(std::max<int64_t>(first_row, split->first_row));
    const int row_end = int(std::min<int64_t>(end_row, split->first_row + split->num_rows));
    const int end = (row_end - split->first_row) * group_size;
    for (int row = (row_begin - split->first_row) * group_size; row < end; ++row) {
      const float* pieces = static_cast<const float*>(partial) + split->partial + size_t(row) * stride;
      float reference = kNothingSeen;
      for (int i = 0; i < split->num_pieces; ++i) reference = std::max(reference, pieces[i * piece_stride + head_dim]);
      float* to = output + (split->first_row + row / group_size) * output_stride +
                  (split->kv_head * group_size + row % group_size) * head_dim;
      float sum = 0.0f;
      for (int i = 0; i < split->num_pieces; ++i) {
        const float* piece = pieces + i * piece_stride;
        const float weight = std::exp2(piece[head_dim] - reference);
        sum += weight * piece[head_dim + 1];
        for (int d = 0; d < head_dim; ++d) to[d] = (i == 0 ? 0.0f : to[d]) + weight * piece[d];
      }
      for (int d = 0; d < head_dim; ++d) to[d] *= 1.0f / sum;
    }
  }
}

}  // namespace pagedd::cpu
