#include "decoder.h"

#include <omp.h>

#include <new>

#include "team.h"
#include "vector_math.h"

namespace pagedd::cpu {
namespace {

constexpr int kRowStep = 8;   // rows that a thread takes at once where rows are independent
constexpr int kStreamedRows = 8;
constexpr size_t kPhasesOfLayer = 11;  // four products, each with its inputs; rope; blocks that are full; attention
constexpr size_t kPhasesBesideLayers = 4;
constexpr size_t kAlignment = 64;

// y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019)
void rms_norm(const float* x, const float* weight, int size, float eps, float* y) {
  Vec squares = Vec::zero();
  for (int i = 0; i < size; i += kLanes) squares = fma(Vec::load(x + i), Vec::load(x + i), squares);
  const Vec factor = Vec::all(1.0f / std::sqrt(squares.sum() / float(size) + eps));
  for (int i = 0; i < size; i += kLanes) (Vec::load(x + i) * factor * Vec::load(weight + i)).store(y + i);
}

// Tiles that a thread takes at once; even, since gate and up tiles come in pairs. For few rows one long piece a thread:
// weights stream from memory, and a stream that breaks off has to be found again. For many, small pieces that even out
// what else the machine does, of the size that shares out best.
int tile_step(const Linear& linear, int num_rows, int num_threads) {
  const int num_tiles = linear.out_features / kTile;
  const auto divide_up = [](int a, int b) { return (a + b - 1) / b; };
  if (num_rows <= kStreamedRows) return divide_up(num_tiles, 2 * num_threads) * 2;
  int best = 0, least = 0;
  for (const int step : {8, 6, 4}) {
    const int longest_share = divide_up(divide_up(num_tiles, step), num_threads) * step;
    if (best == 0 || longest_share < least) best = step, least = longest_share;
  }
  return best;
}

}  // namespace

// Where the intermediate results of a step lie, in one allocation.
struct Decoder::Scratch {
  const int num_threads;
  float* residual;    // [num_tokens, hidden_size]
  float* sampled;     // [num_logits_rows, hidden_size], the residual of the rows that somebody samples from
  float* qkv;         // [num_tokens, qkv_size]
  float* attended;    // [num_tokens, query_size]
  float* inner;       // [num_tokens, intermediate_size]
  uint8_t* prepared;  // inputs of the next product: shared, or one row for each thread
  void* partial;      // attention over split contexts
  std::vector<uint8_t*> attention;  // of each thread
  std::vector<float*> row;          // of each thread, the widest row

  explicit Scratch(int num_threads) : num_threads(num_threads), attention(num_threads), row(num_threads) {}

  // One thread alone is the reference mode: a row is the same to the last bit whatever is computed with it.
  bool may_be_wide() const { return num_threads > 1; }

  // With fewer rows than threads each thread prepares the inputs for itself: cheaper than a phase.
  bool prepares_alone(int num_rows) const { return num_rows < num_threads; }
};

void Decoder::forward(const Batch& batch, const KvCache& kv, int num_threads, float* logits) {
  const int hidden = shape_.hidden_size, num_tokens = batch.num_tokens;
  plan_.build(batch.attention, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, num_threads,
              widest_window());

  std::vector<Phase> phases(kPhasesBesideLayers + kPhasesOfLayer * layers_.size());
  // Laid out twice: to know the size, then at the address that the first pass made.
  Scratch scratch(num_threads);
  size_t prepared_bytes = 0;
  const auto want = [&](const Linear& linear, size_t num_rows) {
    const size_t rows = scratch.prepares_alone(int(num_rows)) ? num_rows * num_threads : num_rows;
    prepared_bytes = std::max(prepared_bytes, rows * prepared_row_bytes(linear.form, linear.in_features));
  };
  for (const Layer& layer : layers_)
    for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      want(*linear, num_tokens);
      want(*linear, batch.num_logits_rows);
    }
  want(head_, batch.num_logits_rows);
  const size_t widest = std::max({hidden, shape_.intermediate_size, shape_.query_size()});
  const auto lay_out = [&](uint8_t* base) {
    size_t used = 0;
    const auto take = [&](size_t bytes) {
      uint8_t* here = base + used;
      used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return here;
    };
    const auto floats = [&](size_t rows, size_t width) {
      return reinterpret_cast<float*>(take(rows * width * sizeof(float)));
    };
    scratch.residual = floats(num_tokens, hidden);
    scratch.sampled = floats(batch.num_logits_rows, hidden);
    scratch.qkv = floats(num_tokens, shape_.qkv_size());
    scratch.attended = floats(num_tokens, shape_.query_size());
    scratch.inner = floats(num_tokens, shape_.intermediate_size);
    scratch.prepared = take(prepared_bytes);
    scratch.partial = take(plan_.partial_bytes());
    for (uint8_t*& attention : scratch.attention) attention = take(plan_.scratch_bytes_per_thread());
    for (float*& row : scratch.row) row = floats(1, widest);
    return used;
  };
  const size_t total = lay_out(nullptr);
  if (memory_bytes_ < total) {
    memory_.reset();  // first, so that old and new are never held together
    memory_bytes_ = 0;
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, total)));
    if (!memory_) throw std::bad_alloc();
    memory_bytes_ = total;
  }
  lay_out(memory_.get());

  const auto plane_bytes = [&](KvType type) {
    return size_t(kv.num_blocks) * shape_.num_kv_heads * record_bytes(type, kv.block_size, shape_.head_dim);
  };
  const size_t key_bytes = plane_bytes(kv.key_type), layer_bytes = key_bytes + plane_bytes(kv.value_type);
  const size_t open_bytes = size_t(kv.num_pages) * shape_.num_kv_heads *
                            record_bytes(KvType::kBFloat16, kv.block_size, shape_.head_dim);
  std::vector<FullBlock> full;
  if (kv.key_type == KvType::kChannel4) full = full_blocks(batch.attention, kv.block_size);
#pragma omp parallel num_threads(num_threads)
  {
    Member member(phases, omp_get_thread_num());
    member.share(num_tokens, kRowStep, [&](int begin, int end) {
      for (int row = begin; row < end; ++row)
        unpack_row(embedding_, batch.token_ids[row], scratch.residual + size_t(row) * hidden);
    });
    const size_t last = layers_.size() - 1;
    for (size_t index = 0; index <= last; ++index) {
      uint8_t* keys = kv.data + index * layer_bytes;
      const KvLayer kv_layer{keys,           keys + key_bytes,      kv.key_type,   kv.value_type,
                             shape_.num_kv_heads, kv.block_size, shape_.head_dim, kv.open_keys + index * open_bytes};
      run_layer(layers_[index], index == last, kv_layer, batch, full, scratch, member);
    }
    const size_t row_bytes = prepared_row_bytes(head_.form, hidden);
    member.share(batch.num_logits_rows, 1, [&](int begin, int end) {
      for (int row = begin; row < end; ++row) {
        const float* x = scratch.sampled + size_t(row) * hidden;
        rms_norm(x, final_norm_, hidden, shape_.rms_norm_eps, scratch.row[member.thread()]);
        prepare_row(head_.form, hidden, scratch.row[member.thread()], scratch.prepared + row * row_bytes);
      }
    });
    const int step = tile_step(head_, batch.num_logits_rows, num_threads);
    member.share(head_.out_features / kTile, step, [&](int begin, int end) {
      multiply(head_, scratch.prepared, 0, batch.num_logits_rows, begin, end, begin + step * num_threads,
               scratch.may_be_wide(), Epilogue::kStore, logits, head_.out_features);
    });
  }
}

int Decoder::widest_window() const {
  int widest = 0;
  for (const Layer& layer : layers_) {
    if (layer.sliding_window == 0) return 0;
    widest = std::max(widest, layer.sliding_window);
  }
  return widest;
}

void Decoder::run_layer(const Layer& layer, bool is_last, const KvLayer& kv, const Batch& batch,
                        const std::vector<FullBlock>& full, Scratch& scratch, Member& member) {
  const int num_tokens = batch.num_tokens, hidden = shape_.hidden_size;
  const int query_size = shape_.query_size(), qkv_size = shape_.qkv_size();
  float* const own_row = scratch.row[member.thread()];

  // y = epilogue(linear · rows), where make_row(row) returns a row of floats.
  const auto product = [&](const Linear& linear, int num_rows, auto make_row, Epilogue epilogue, float* y, int width) {
    const bool alone = scratch.prepares_alone(num_rows);
    const size_t row_bytes = prepared_row_bytes(linear.form, linear.in_features);
    uint8_t* inputs = scratch.prepared + (alone ? size_t(member.thread()) * num_rows * row_bytes : 0);
    const auto prepare = [&](int begin, int end) {
      for (int row = begin; row < end; ++row)
        prepare_row(linear.form, linear.in_features, make_row(row), inputs + row * row_bytes);
    };
    if (!alone) member.share(num_rows, kRowStep, prepare);
    bool is_prepared = !alone;
    const int step = tile_step(linear, num_rows, scratch.num_threads);
    member.share(linear.out_features / kTile, step, [&](int begin, int end) {
      // Only by who holds a piece: as long as it does, no later phase can change what make_row reads.
      if (!is_prepared) prepare(0, num_rows);
      is_prepared = true;
      multiply(linear, inputs, 0, num_rows, begin, end, begin + step * scratch.num_threads, scratch.may_be_wide(),
               epilogue, y, width);
    });
  };
  const auto normed = [&](const float* rows, const float* weight) {
    return [&, rows, weight](int row) {
      rms_norm(rows + size_t(row) * hidden, weight, hidden, shape_.rms_norm_eps, own_row);
      return own_row;
    };
  };

  product(layer.qkv, num_tokens, normed(scratch.residual, layer.attention_norm), Epilogue::kStore, scratch.qkv,
          qkv_size);
  member.share(num_tokens, kRowStep, [&](int begin, int end) {
    rope_and_write_kv(scratch.qkv, qkv_size, begin, end, shape_.num_heads, batch.cos, batch.sin, layer.query_norm,
                      layer.key_norm, shape_.rms_norm_eps, batch.slots, batch.open_slots, kv);
  });
  if (!full.empty())
    member.share(int(full.size()), 1, [&](int index, int) { close_block(kv, full[index]); });
  const float scale = 1.0f / std::sqrt(float(shape_.head_dim));
  member.share(plan_.num_items(), 1, [&](int item, int) {
    attend_item(plan_, batch.attention, item, scratch.qkv, qkv_size, kv, scale, 0.0f, layer.sliding_window,
                scratch.attended, query_size, scratch.partial, scratch.attention[member.thread()]);
  });

  // From here on no row looks at another: of the last layer's only those go on that somebody samples from.
  const int num_rows = is_last ? batch.num_logits_rows : num_tokens;
  float* residual = is_last ? scratch.sampled : scratch.residual;
  const auto token_of = [&](int row) { return is_last ? batch.logits_rows[row] : int64_t(row); };
  if (is_last)
    member.share(num_rows, 1, [&](int row, int) {
      std::copy_n(scratch.residual + token_of(row) * hidden, hidden, residual + size_t(row) * hidden);
    });
  const auto combined = [&](int row) -> const float* {
    const int64_t token = token_of(row);
    float* attended = scratch.attended + token * query_size;
    if (scratch.prepares_alone(num_rows)) {  // every thread reduces the same partial results, each into its own row
      std::copy_n(attended, query_size, own_row);
      attended = own_row;
    }
    combine_rows(plan_, token, token + 1, attended - token * query_size, query_size, scratch.partial);
    return attended;
  };
  product(layer.output, num_rows, combined, Epilogue::kAdd, residual, hidden);

  product(layer.gate_up, num_rows, normed(residual, layer.mlp_norm), Epilogue::kSiluAndMul, scratch.inner,
          shape_.intermediate_size);
  const auto inner = [&](int row) { return scratch.inner + size_t(row) * shape_.intermediate_size; };
  product(layer.down, num_rows, inner, Epilogue::kAdd, residual, hidden);
}

}  // namespace pagedd::cpu
