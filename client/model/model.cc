#include "client/model/model.h"

#include <cmath>

#include "absl/status/status.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "kernels/format/element.h"

namespace tessera::llm {

namespace {

std::vector<float> Product(std::span<const float> rows, const Panels& matrix) {
  const std::size_t count = rows.size() / matrix.in();
  std::vector<float> product(count * matrix.out());
  Multiply(rows.data(), matrix.in(), matrix, {count, matrix.in(), matrix.out()}, product.data(),
           matrix.out());
  return product;
}

// Adds the vector to each row. Empty: none.
void AddBias(std::span<const float> bias, std::span<float> rows) {
  for (std::size_t i = 0; !bias.empty() && i < rows.size(); ++i) rows[i] += bias[i % bias.size()];
}

void Add(std::span<const float> rows, std::span<float> hidden) {
  for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] += rows[i];
}

std::vector<std::uint16_t> ToBf16(std::span<const float> values) {
  std::vector<std::uint16_t> rounded(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) rounded[i] = kernels::FloatToBf16(values[i]);
  return rounded;
}

}  // namespace

// RoPE rotates channels i and i + head_dim / 2 of a head together.
struct Model::Rotary {
  std::size_t dim;
  std::vector<float> cosine, sine;  // [tokens][head_dim / 2]

  Rotary(const Config& config, std::span<const std::uint32_t> positions) : dim(config.head_dim) {
    for (const std::uint32_t position : positions) {
      for (std::size_t i = 0; i < dim / 2; ++i) {
        const double frequency =
            std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        cosine.push_back(static_cast<float>(std::cos(position * frequency)));
        sine.push_back(static_cast<float>(std::sin(position * frequency)));
      }
    }
  }

  // [tokens][heads][head_dim]
  void Turn(std::span<float> rows, std::size_t heads) const {
    const std::size_t half = dim / 2;
    for (std::size_t head = 0; head < rows.size() / dim; ++head) {
      float* const row = &rows[head * dim];
      const std::size_t at = head / heads * half;
      for (std::size_t i = 0; i < half; ++i) {
        const float low = row[i], high = row[i + half];
        row[i] = low * cosine[at + i] - high * sine[at + i];
        row[i + half] = high * cosine[at + i] + low * sine[at + i];
      }
    }
  }
};

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& path) {
  absl::StatusOr<Checkpoint> files = Checkpoint::Open(path);
  if (!files.ok()) return files.status();
  std::unique_ptr<Model> model(new Model(*std::move(files)));
  if (absl::Status status = model->LoadWeights(); !status.ok()) return status;
  return model;
}

std::uint64_t Model::StoredRow(std::uint64_t row, std::uint32_t heads) const {
  if (heads == 0 || !files_.has_interleaved_heads()) return row;
  const std::uint64_t dim = config().head_dim;
  const std::uint64_t in_head = row % dim;
  return row - in_head + in_head % (dim / 2) * 2 + in_head / (dim / 2);
}

absl::StatusOr<Panels> Model::Matrix(const std::string& name, std::uint64_t in, std::uint64_t out,
                                     std::uint32_t heads) const {
  const absl::StatusOr<Tensor> tensor = files_.Find(name, {out, in});
  if (!tensor.ok()) return tensor.status();
  return Panels::OfTensor(*tensor, [&](std::uint64_t row) { return StoredRow(row, heads); });
}

absl::StatusOr<std::vector<float>> Model::Vector(const std::string& name, std::uint64_t size,
                                                 std::uint32_t heads) const {
  const absl::StatusOr<Tensor> tensor = files_.Find(name, {size});
  if (!tensor.ok()) return tensor.status();
  std::vector<float> stored(size), values(size);
  tensor->ReadRow(0, stored);
  for (std::uint64_t i = 0; i < size; ++i) values[i] = stored[StoredRow(i, heads)];
  return values;
}

absl::StatusOr<Model::Layer> Model::LoadLayer(std::uint32_t index) const {
  const Config& config = this->config();
  const std::string prefix = Concat("model.layers.", index, ".");
  const std::uint64_t hidden = config.hidden, mlp = config.mlp;
  const std::uint64_t query_row = config.query_row(), kv_row = config.kv_row();
  Layer layer;
  const struct {
    const char* name;
    std::uint64_t in, out;
    Panels& matrix;
    std::uint32_t heads = 0;
  } matrices[] = {
      {"self_attn.q_proj.weight", hidden, query_row, layer.query, config.query_heads},
      {"self_attn.k_proj.weight", hidden, kv_row, layer.key, config.kv_heads},
      {"self_attn.v_proj.weight", hidden, kv_row, layer.value},
      {"self_attn.o_proj.weight", query_row, hidden, layer.output},
      {"mlp.gate_proj.weight", hidden, mlp, layer.gate},
      {"mlp.up_proj.weight", hidden, mlp, layer.up},
      {"mlp.down_proj.weight", mlp, hidden, layer.down},
  };
  for (const auto& [name, in, out, matrix, heads] : matrices) {
    absl::StatusOr<Panels> loaded = Matrix(prefix + name, in, out, heads);
    if (!loaded.ok()) return loaded.status();
    matrix = *std::move(loaded);
  }
  const struct {
    const char* name;
    std::uint64_t size;
    std::vector<float>& vector;
    std::uint32_t heads = 0;
    bool exists = true;
  } vectors[] = {
      {"input_layernorm.weight", hidden, layer.attention_norm},
      {"post_attention_layernorm.weight", hidden, layer.mlp_norm},
      {"self_attn.q_proj.bias", query_row, layer.query_bias, config.query_heads, config.qkv_bias},
      {"self_attn.k_proj.bias", kv_row, layer.key_bias, config.kv_heads, config.qkv_bias},
      {"self_attn.v_proj.bias", kv_row, layer.value_bias, 0, config.qkv_bias},
  };
  for (const auto& [name, size, vector, heads, exists] : vectors) {
    if (!exists) continue;
    absl::StatusOr<std::vector<float>> loaded = Vector(prefix + name, size, heads);
    if (!loaded.ok()) return loaded.status();
    vector = *std::move(loaded);
  }
  return layer;
}

absl::Status Model::LoadWeights() {
  const Config& config = this->config();
  const std::string embedding = "model.embed_tokens.weight";
  absl::StatusOr<Tensor> rows = files_.Find(embedding, {config.vocabulary, config.hidden});
  if (!rows.ok()) return rows.status();
  embedding_ = *std::move(rows);
  for (std::uint32_t i = 0; i < config.layers; ++i) {
    absl::StatusOr<Layer> layer = LoadLayer(i);
    if (!layer.ok()) return layer.status();
    layers_.push_back(*std::move(layer));
  }
  absl::StatusOr<std::vector<float>> norm = Vector("model.norm.weight", config.hidden);
  if (!norm.ok()) return norm.status();
  last_norm_ = *std::move(norm);
  absl::StatusOr<Panels> output =
      Matrix(config.tied_output ? embedding : "lm_head.weight", config.hidden, config.vocabulary);
  if (!output.ok()) return output.status();
  output_ = *std::move(output);
  return absl::OkStatus();
}

absl::Status Model::CheckPass(const Pass& pass) const {
  TESSERA_CHECK(pass.tokens.size() == pass.positions.size(), "one position per token");
  for (const std::uint32_t row : pass.logits_of) {
    TESSERA_CHECK(row < pass.tokens.size(), "logits_of names tokens of the pass");
  }
  for (const TokenId token : pass.tokens) {
    if (token >= config().vocabulary) {
      return absl::InvalidArgumentError(Concat(
          "token ", token, " is out of range; the vocabulary size is ", config().vocabulary));
    }
  }
  for (const std::uint32_t position : pass.positions) {
    if (position >= config().max_positions) {
      return absl::OutOfRangeError(Concat("position ", position,
                                          " is out of range; the model's limit is ",
                                          config().max_positions));
    }
  }
  return absl::OkStatus();
}

std::vector<float> Model::Embed(std::span<const TokenId> tokens) const {
  std::vector<float> hidden(tokens.size() * config().hidden);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    embedding_.ReadRow(tokens[i], std::span(hidden).subspan(i * config().hidden, config().hidden));
  }
  return hidden;
}

std::vector<float> Model::Normalised(std::span<const float> hidden,
                                     const std::vector<float>& weights) const {
  std::vector<float> rows(hidden.begin(), hidden.end());
  for (std::size_t first = 0; first < rows.size(); first += config().hidden) {
    float squares = 0;
    for (std::size_t i = 0; i < config().hidden; ++i) squares += rows[first + i] * rows[first + i];
    const float mean = squares / static_cast<float>(config().hidden);
    const float factor = 1 / std::sqrt(mean + config().norm_epsilon);
    for (std::size_t i = 0; i < config().hidden; ++i) rows[first + i] *= factor * weights[i];
  }
  return rows;
}

absl::Status Model::AddAttention(std::uint32_t index, const Rotary& rotary, Attention& attention,
                                 std::span<float> hidden) const {
  const Layer& layer = layers_[index];
  const std::vector<float> rows = Normalised(hidden, layer.attention_norm);
  std::vector<float> query = Product(rows, layer.query);
  std::vector<float> key = Product(rows, layer.key);
  std::vector<float> value = Product(rows, layer.value);
  AddBias(layer.query_bias, query);
  AddBias(layer.key_bias, key);
  AddBias(layer.value_bias, value);
  rotary.Turn(query, config().query_heads);
  rotary.Turn(key, config().kv_heads);
  // Every implementation of Attention gets rows in the cache's type.
  const std::vector<std::uint16_t> keys = ToBf16(key), queries = ToBf16(query);
  const std::vector<std::uint16_t> values = ToBf16(value);
  std::vector<float> attended(query.size());
  const absl::Status status = attention.Attend({.layer = index,
                                                .key = keys,
                                                .value = values,
                                                .query = queries,
                                                .exact_key = key,
                                                .exact_value = value,
                                                .exact_query = query},
                                               attended);
  if (!status.ok()) return status;
  Add(Product(attended, layer.output), hidden);
  return absl::OkStatus();
}

void Model::AddMlp(const Layer& layer, std::span<float> hidden) const {
  const std::vector<float> rows = Normalised(hidden, layer.mlp_norm);
  std::vector<float> gate = Product(rows, layer.gate);
  const std::vector<float> up = Product(rows, layer.up);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
  Add(Product(gate, layer.down), hidden);
}

absl::StatusOr<std::vector<float>> Model::Forward(const Pass& pass, Attention& attention) const {
  if (absl::Status status = CheckPass(pass); !status.ok()) return status;
  const Rotary rotary(config(), pass.positions);
  std::vector<float> hidden = Embed(pass.tokens);
  for (std::uint32_t i = 0; i < config().layers; ++i) {
    if (absl::Status status = AddAttention(i, rotary, attention, hidden); !status.ok()) {
      return status;
    }
    AddMlp(layers_[i], hidden);
  }
  std::vector<float> chosen;
  for (const std::uint32_t row : pass.logits_of) {
    const auto first =
        hidden.begin() + static_cast<std::ptrdiff_t>(std::size_t{row} * config().hidden);
    chosen.insert(chosen.end(), first, first + config().hidden);
  }
  return Product(Normalised(chosen, last_norm_), output_);
}

}  // namespace tessera::llm
