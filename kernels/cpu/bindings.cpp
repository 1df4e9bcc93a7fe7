// What Python sees: packed weights, a decoder that runs over torch tensors, and draws from its logits. The only file that
// includes torch.
#include <torch/extension.h>

#include "decoder.h"
#include "sampling.h"
#include "wide_product.h"

namespace pagedd::cpu {
namespace {

Form form_of(const std::string& name) {
  if (name == "float32") return Form::kFloat32;
  if (name == "bf16") return Form::kBFloat16;
  if (name == "int8") return Form::kInt8;
  if (name == "int4") return Form::kInt4;
  throw std::invalid_argument("weight form '" + name + "': use float32, bf16, int8 or int4");
}

Epilogue epilogue_of(const std::string& name) {
  if (name == "store") return Epilogue::kStore;
  if (name == "add") return Epilogue::kAdd;
  if (name == "silu_and_mul") return Epilogue::kSiluAndMul;
  throw std::invalid_argument("epilogue '" + name + "': use store, add or silu_and_mul");
}

// Of keys and of values.
std::pair<KvType, KvType> kv_types_of(const std::string& form) {
  if (form == "float32") return {KvType::kFloat32, KvType::kFloat32};
  if (form == "bf16") return {KvType::kBFloat16, KvType::kBFloat16};
  if (form == "int8") return {KvType::kInt8, KvType::kInt8};
  if (form == "fp8") return {KvType::kFp8, KvType::kFp8};
  if (form == "k8v4") return {KvType::kInt8, KvType::kInt4};
  if (form == "int4") return {KvType::kChannel4, KvType::kInt4};
  throw std::invalid_argument("KV form '" + form + "': use float32, bf16, int8, fp8, k8v4 or int4");
}

template <class T>
const T* data(const torch::Tensor& tensor, torch::ScalarType type, const char* name) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.device().is_cpu() && tensor.scalar_type() == type, name,
              ": a contiguous CPU tensor of ", type, " is expected");
  return static_cast<const T*>(tensor.data_ptr());
}

void check_sizes(int64_t out, int64_t in) {
  TORCH_CHECK(out % kTile == 0 && in % kGroup == 0, "a weight of ", out, " x ", in, " cannot be packed: multiples of ",
              kTile, " and ", kGroup, " are expected");
}

// Weight [out, in] float32 → tiles, uint8.
torch::Tensor pack(const torch::Tensor& weight, const std::string& form_name) {
  const Form form = form_of(form_name);
  const int64_t out = weight.size(0), in = weight.size(1);
  check_sizes(out, in);
  auto tiles = torch::empty({out / kTile, int64_t(Linear::tile_bytes(form, int(in)))}, torch::kUInt8);
  pack_floats(data<float>(weight, torch::kFloat32, "weight"), int(out), int(in), form, tiles.data_ptr<uint8_t>());
  return tiles;
}

// q [out, in] uint8, scale and offset [out, in / 32] float16 → tiles, uint8.
torch::Tensor pack_blocks(const torch::Tensor& q, const torch::Tensor& scale, const torch::Tensor& offset,
                          const std::string& form_name) {
  const Form form = form_of(form_name);
  TORCH_CHECK(form == Form::kInt4 || form == Form::kInt8, "quantized weights are packed as int4 or int8");
  const int64_t out = q.size(0), in = q.size(1);
  check_sizes(out, in);
  auto tiles = torch::empty({out / kTile, int64_t(Linear::tile_bytes(form, int(in)))}, torch::kUInt8);
  pack_quantized(data<uint8_t>(q, torch::kUInt8, "q"), data<uint16_t>(scale, torch::kFloat16, "scale"),
                 data<uint16_t>(offset, torch::kFloat16, "offset"), int(out), int(in), form,
                 tiles.data_ptr<uint8_t>());
  return tiles;
}

// A packed weight with the tensors that it points into.
struct PackedLinear {
  torch::Tensor tiles;
  std::optional<torch::Tensor> bias;
  Linear linear;

  PackedLinear(torch::Tensor tiles_in, const std::string& form, int in_features, std::optional<torch::Tensor> bias_in)
      : tiles(std::move(tiles_in)), bias(std::move(bias_in)) {
    linear = {form_of(form), in_features, int(tiles.size(0)) * kTile, data<uint8_t>(tiles, torch::kUInt8, "tiles"),
              bias ? data<float>(*bias, torch::kFloat32, "bias") : nullptr};
    TORCH_CHECK(size_t(tiles.size(1)) == linear.tile_bytes(), "tiles do not have the size of their form");
    TORCH_CHECK(!bias || bias->numel() == linear.out_features, "bias: one value an output is expected");
  }

  // x [rows, in] float32 → [rows, out] float32, on the calling thread; half as wide with `silu_and_mul`. With `add` the
  // result is added to `y`, which is returned.
  torch::Tensor multiply_rows(const torch::Tensor& x, bool may_be_wide, const std::string& epilogue_name,
                              std::optional<torch::Tensor> y) const {
    const Epilogue epilogue = epilogue_of(epilogue_name);
    const int rows = int(x.size(0)), num_tiles = linear.out_features / kTile;
    const int64_t width = epilogue == Epilogue::kSiluAndMul ? linear.out_features / 2 : linear.out_features;
    TORCH_CHECK(x.dim() == 2 && x.size(1) == linear.in_features, "x: rows of ", linear.in_features, " are expected");
    TORCH_CHECK(y.has_value() == (epilogue == Epilogue::kAdd), "y: expected with add, and only then");
    if (!y) y = torch::empty({rows, width});
    TORCH_CHECK(y->sizes() == torch::IntArrayRef({rows, width}), "y: [", rows, ", ", width, "] is expected");
    const float* values = data<float>(x, torch::kFloat32, "x");
    const size_t row_bytes = prepared_row_bytes(linear.form, linear.in_features);
    std::vector<uint8_t> prepared(rows * row_bytes);
    for (int row = 0; row < rows; ++row)
      prepare_row(linear.form, linear.in_features, values + size_t(row) * linear.in_features,
                  prepared.data() + row * row_bytes);
    multiply(linear, prepared.data(), 0, rows, 0, num_tiles, num_tiles, may_be_wide, epilogue,
             const_cast<float*>(data<float>(*y, torch::kFloat32, "y")), width);
    return *y;
  }

  torch::Tensor row(int64_t index) const {
    auto out = torch::empty({linear.in_features});
    unpack_row(linear, index, out.data_ptr<float>());
    return out;
  }
};

constexpr int kLeastRowsOfThread = 4;  // a row takes a tenth of a millisecond, waking a thread may take as long

const float* logits_of(const torch::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.device().is_cpu() &&
                  logits.scalar_type() == torch::kFloat32,
              "logits: rows of float32 on the CPU are expected");
  return logits.data_ptr<float>();
}

// Calls use(row, scratch) for each row, on torch's threads.
template <class Use>
void for_each_row(int64_t num_rows, Use use) {
  const pybind11::gil_scoped_release release;
  at::parallel_for(0, num_rows, kLeastRowsOfThread, [&](int64_t begin, int64_t end) {
    SamplingScratch scratch;
    for (int64_t row = begin; row < end; ++row) use(row, scratch);
  });
}

// Of logits [rows, vocabulary] float32 and each row's Choice: token ids, [rows] int64.
torch::Tensor draw_tokens(const torch::Tensor& logits, const torch::Tensor& temperatures, const torch::Tensor& limits,
                          const torch::Tensor& shares, const torch::Tensor& floors, const torch::Tensor& draws) {
  const float* const values = logits_of(logits);
  const int64_t num_rows = logits.size(0);
  for (const auto& tensor : {temperatures, limits, shares, floors, draws})
    TORCH_CHECK(tensor.numel() == num_rows, "a choice for each of ", num_rows, " rows is expected");
  const float* const temperature = data<float>(temperatures, torch::kFloat32, "temperatures");
  const int64_t* const limit = data<int64_t>(limits, torch::kInt64, "limits");
  const double* const share = data<double>(shares, torch::kFloat64, "shares");
  const int64_t* const floor = data<int64_t>(floors, torch::kInt64, "floors");
  const double* const draw = data<double>(draws, torch::kFloat64, "draws");
  auto tokens = torch::empty({num_rows}, torch::kInt64);
  auto* const token = tokens.data_ptr<int64_t>();
  for_each_row(num_rows, [&](int64_t row, SamplingScratch& scratch) {
    token[row] = draw_token(values + row * logits.stride(0), int(logits.size(1)),
                            {temperature[row], limit[row], share[row], floor[row], draw[row]}, scratch);
  });
  return tokens;
}

// Of logits [rows, vocabulary] float32: ids of the best, [rows, width] int64, and log Σ exp, [rows, 1] float32.
std::pair<torch::Tensor, torch::Tensor> rank_tokens(const torch::Tensor& logits, int width) {
  const float* const values = logits_of(logits);
  const int64_t num_rows = logits.size(0);
  TORCH_CHECK(0 <= width && width <= logits.size(1), "width ", width, ": 0 to the vocabulary's ", logits.size(1),
              " are expected");
  auto ids = torch::empty({num_rows, width}, torch::kInt64);
  auto normalizers = torch::empty({num_rows, 1});
  auto* const id = ids.data_ptr<int64_t>();
  auto* const normalizer = normalizers.data_ptr<float>();
  for_each_row(num_rows, [&](int64_t row, SamplingScratch& scratch) {
    normalizer[row] = best_tokens(values + row * logits.stride(0), int(logits.size(1)), width, id + row * width, scratch);
  });
  return {ids, normalizers};
}

class TorchDecoder {
 public:
  TorchDecoder(int hidden_size, int intermediate_size, int num_heads, int num_kv_heads, int head_dim, float eps,
               std::shared_ptr<PackedLinear> embedding, torch::Tensor final_norm, std::shared_ptr<PackedLinear> head)
      : head_dim_(head_dim),
        num_kv_heads_(num_kv_heads),
        vocab_size_(head->linear.out_features),
        decoder_({hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, eps}, keep(embedding),
                 keep(final_norm), keep(head)) {}

  void add_layer(const torch::Tensor& attention_norm, const std::shared_ptr<PackedLinear>& qkv,
                 const std::optional<torch::Tensor>& query_norm, const std::optional<torch::Tensor>& key_norm,
                 const std::shared_ptr<PackedLinear>& output, const torch::Tensor& mlp_norm,
                 const std::shared_ptr<PackedLinear>& gate_up, const std::shared_ptr<PackedLinear>& down,
                 int sliding_window) {
    decoder_.add_layer({keep(attention_norm), keep(qkv), query_norm ? keep(*query_norm) : nullptr,
                        key_norm ? keep(*key_norm) : nullptr, keep(output), keep(mlp_norm), keep(gate_up), keep(down),
                        sliding_window});
    ++num_layers_;
  }

  // Shapes and dtypes are those of engine/batch.py; kv is the whole cache, [layers, bytes], of num_blocks blocks in the
  // form of that name. Returns [num_rows, vocabulary] float32.
  torch::Tensor forward(const torch::Tensor& token_ids, const torch::Tensor& cos, const torch::Tensor& sin,
                        const torch::Tensor& slots, const torch::Tensor& query_starts,
                        const torch::Tensor& context_lens, const torch::Tensor& block_tables,
                        const torch::Tensor& logits_rows, const torch::Tensor& kv, const std::string& kv_form,
                        int64_t num_blocks, int block_size, const torch::Tensor& open_keys,
                        const torch::Tensor& open_slots, const torch::Tensor& open_tables) {
    const auto [key_type, value_type] = kv_types_of(kv_form);
    const int64_t block_bytes = record_bytes(key_type, block_size, int(head_dim_)) +
                                record_bytes(value_type, block_size, int(head_dim_));
    TORCH_CHECK(kv.dim() == 2 && kv.size(0) == num_layers_ && kv.size(1) == num_blocks * num_kv_heads_ * block_bytes,
                "kv: all layers of this model's cache are expected, ", num_blocks, " blocks of ", block_size, " as ",
                kv_form);
    const bool has_open_keys = key_type == KvType::kChannel4;
    if (has_open_keys) {
      TORCH_CHECK(block_size % kRowsAtOnce == 0, "blocks of ", block_size, ": multiples of ", kRowsAtOnce, " are expected");
      TORCH_CHECK(open_keys.dim() == 5 && open_keys.size(0) == num_layers_ && open_keys.size(2) == num_kv_heads_ &&
                      open_keys.size(3) == block_size && open_keys.size(4) == head_dim_ &&
                      open_slots.size(0) == token_ids.size(0) && open_tables.size(0) == context_lens.size(0),
                  "open_keys, open_slots, open_tables: as engine/kv/storage.py and engine/batch.py have them");
    }
    const Batch batch{
        int(token_ids.size(0)),
        data<int64_t>(token_ids, torch::kInt64, "token_ids"),
        data<float>(cos, torch::kFloat32, "cos"),
        data<float>(sin, torch::kFloat32, "sin"),
        data<int64_t>(slots, torch::kInt64, "slots"),
        data<int64_t>(open_slots, torch::kInt64, "open_slots"),
        {data<int32_t>(query_starts, torch::kInt32, "query_starts"),
         data<int32_t>(context_lens, torch::kInt32, "context_lens"),
         data<int32_t>(block_tables, torch::kInt32, "block_tables"), block_tables.size(1), int(context_lens.size(0)),
         data<int32_t>(open_tables, torch::kInt32, "open_tables"), open_tables.size(1)},
        int(logits_rows.size(0)),
        data<int64_t>(logits_rows, torch::kInt64, "logits_rows"),
    };
    auto logits = torch::empty({logits_rows.size(0), vocab_size_});
    auto* const open_pages = const_cast<at::BFloat16*>(data<at::BFloat16>(open_keys, torch::kBFloat16, "open_keys"));
    const KvCache cache{const_cast<uint8_t*>(data<uint8_t>(kv, torch::kUInt8, "kv")), key_type, value_type, num_blocks,
                        block_size, reinterpret_cast<uint8_t*>(open_pages), open_keys.size(1)};
    const pybind11::gil_scoped_release release;
    decoder_.forward(batch, cache, at::get_num_threads(), logits.data_ptr<float>());
    return logits;
  }

  size_t scratch_bytes() const { return decoder_.scratch_bytes(); }

 private:
  const float* keep(const torch::Tensor& tensor) {
    kept_tensors_.push_back(tensor);
    return data<float>(tensor, torch::kFloat32, "weight");
  }
  Linear keep(const std::shared_ptr<PackedLinear>& linear) {
    kept_linears_.push_back(linear);
    return linear->linear;
  }

  std::vector<torch::Tensor> kept_tensors_;
  std::vector<std::shared_ptr<PackedLinear>> kept_linears_;
  int64_t num_layers_ = 0;
  int64_t head_dim_, num_kv_heads_, vocab_size_;
  Decoder decoder_;
};

}  // namespace
}  // namespace pagedd::cpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace pagedd::cpu;
  namespace py = pybind11;
  module.def("pack", &pack, py::arg("weight"), py::arg("form"));
  module.def("pack_blocks", &pack_blocks, py::arg("q"), py::arg("scale"), py::arg("offset"), py::arg("form"));
  module.attr("INSTRUCTIONS") = instructions();  // None: see linear.h
  // None: products have no wide form here.
  module.attr("LEAST_WIDE_ROWS") = kHasWideProduct ? py::object(py::int_(kLeastWideRows)) : py::none();
  py::class_<PackedLinear, std::shared_ptr<PackedLinear>>(module, "PackedLinear")
      .def(py::init<torch::Tensor, const std::string&, int, std::optional<torch::Tensor>>(), py::arg("tiles"),
           py::arg("form"), py::arg("in_features"), py::arg("bias") = py::none())
      .def("multiply", &PackedLinear::multiply_rows, py::arg("x"), py::arg("may_be_wide") = false,
           py::arg("epilogue") = "store", py::arg("y") = py::none())
      .def("row", &PackedLinear::row, py::arg("index"));
  module.def("draw_tokens", &draw_tokens, py::arg("logits"), py::arg("temperatures"), py::arg("limits"),
             py::arg("shares"), py::arg("floors"), py::arg("draws"));
  module.def("rank_tokens", &rank_tokens, py::arg("logits"), py::arg("width"));
  py::class_<TorchDecoder>(module, "Decoder")
      .def(py::init<int, int, int, int, int, float, std::shared_ptr<PackedLinear>, torch::Tensor,
                    std::shared_ptr<PackedLinear>>(),
           py::arg("hidden_size"), py::arg("intermediate_size"), py::arg("num_heads"), py::arg("num_kv_heads"),
           py::arg("head_dim"), py::arg("rms_norm_eps"), py::arg("embedding"), py::arg("final_norm"), py::arg("head"))
      .def("add_layer", &TorchDecoder::add_layer, py::arg("attention_norm"), py::arg("qkv"), py::arg("query_norm"),
           py::arg("key_norm"), py::arg("output"), py::arg("mlp_norm"), py::arg("gate_up"), py::arg("down"),
           py::arg("sliding_window"))
      .def_property_readonly("scratch_bytes", &TorchDecoder::scratch_bytes)
      .def("forward", &TorchDecoder::forward, py::arg("token_ids"), py::arg("cos"), py::arg("sin"), py::arg("slots"),
           py::arg("query_starts"), py::arg("context_lens"), py::arg("block_tables"), py::arg("logits_rows"),
           py::arg("kv"), py::arg("kv_form"), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("open_keys"), py::arg("open_slots"), py::arg("open_tables"));
}
