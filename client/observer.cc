#include "client/observer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "daemon/base/strings.h"
#include "kernels/format/element.h"
#include "kernels/tokens/counts.h"

namespace tessera::client {

namespace {

std::uint64_t CountUp(double share, std::uint64_t tokens) {
  return kernels::CountUp(share * static_cast<double>(tokens));
}

double SquaredNorm(const std::byte* row, std::uint32_t size, kernels::ElementType type) {
  double sum = 0;
  for (std::uint32_t i = 0; i < size; ++i) {
    float value;
    if (type == kernels::ElementType::kFp32) {
      std::memcpy(&value, row + i * sizeof value, sizeof value);
    } else {
      std::uint16_t bits;
      std::memcpy(&bits, row + i * sizeof bits, sizeof bits);
      value = type == kernels::ElementType::kBf16 ? kernels::Bf16ToFloat(bits)
                                                  : kernels::Fp16ToFloat(bits);
    }
    sum += static_cast<double>(value) * value;
  }
  return sum;
}

v1::Tensor Inline(v1::DType type, std::initializer_list<std::uint64_t> shape) {
  v1::Tensor tensor;
  tensor.set_dtype(type);
  for (const std::uint64_t dimension : shape) tensor.add_shape(dimension);
  return tensor;
}

std::uint64_t RowBytes(const kernels::LayerGeometry& geometry) {
  return geometry.head_dim * kernels::ElementBytes(geometry.type);
}

}  // namespace

Observer::Observer(v1::PolicyNeeds needs, std::shared_ptr<const BoundModel> model)
    : needs_(std::move(needs)), model_(std::move(model)) {}

absl::Status Observer::See(const ObservedRows& rows, const kernels::Operations& operations) {
  if (rows.layer >= model_->layers()) {
    return absl::InvalidArgumentError(
        Concat("layer is ", rows.layer, "; the model has ", model_->layers(), " layers"));
  }
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  const std::uint64_t tokens = rows.query.size() / token_bytes;
  if (tokens == 0 || rows.query.size() % token_bytes != 0) {
    return absl::InvalidArgumentError(Concat("query has ", rows.query.size(), " bytes; a token of ",
                                             geometry.query_heads, " heads has ", token_bytes));
  }
  const std::uint64_t key_bytes = tokens * geometry.kv_heads * RowBytes(geometry);
  if (needs_.attention_sums() && rows.key.size() != key_bytes) {
    return absl::InvalidArgumentError(
        Concat("key has ", rows.key.size(), " bytes; ", tokens, " tokens of ", geometry.kv_heads,
               " kv heads have ", key_bytes, ", and the policy asks for sums of attention"));
  }
  Layer& layer = layers_[rows.layer];
  if (rows.first_token > layer.next && !layer.empty()) {
    return absl::OutOfRangeError(Concat("first_token is ", rows.first_token, "; layer ", rows.layer,
                                        " was seen up to token ", layer.next));
  }
  if (rows.first_token < layer.next) ForgetFrom(rows.first_token, rows.layer);
  SeeLast(rows, tokens, layer);
  SeeNorms(rows, tokens, layer);
  if (needs_.attention_sums()) SeeSums(rows, tokens, operations, layer);
  layer.next = rows.first_token + tokens;
  return absl::OkStatus();
}

// What was paid by queries from there on cannot be taken back from sums: those begin anew.
void Observer::ForgetFrom(std::uint64_t token, std::uint32_t index) {
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  Layer& layer = layers_[index];
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  const std::uint64_t left = token > layer.last_first ? token - layer.last_first : 0;
  layer.last.resize(std::min<std::uint64_t>(layer.last.size(), left * token_bytes));
  for (HeadRows& head : layer.norms) head.erase(head.lower_bound(token), head.end());
  layer.keys.clear();
  layer.sums.clear();
}

void Observer::CutTo(std::uint64_t tokens, std::uint32_t index) {
  const std::uint64_t ids = tokens - std::min(tokens, first_id_);
  if (index == 0 && ids_.size() > ids) ids_.resize(ids);  // they are shown as of that layer
  const auto layer = layers_.find(index);
  if (layer == layers_.end() || layer->second.next <= tokens) return;
  ForgetFrom(tokens, index);
  layer->second.next = tokens;
}

void Observer::SeeLast(const ObservedRows& rows, std::uint64_t tokens, Layer& layer) {
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  // Of tokens that are decoded all wait for the next call.
  const std::uint64_t most = std::max({std::uint64_t{needs_.last_queries()},
                                       CountUp(needs_.last_share(), rows.first_token + tokens),
                                       needs_.decode_queries() ? kMostDecoded : 0});
  if (most == 0) return;
  if (layer.last.empty()) layer.last_first = rows.first_token;
  layer.last.insert(layer.last.end(), rows.query.begin(), rows.query.end());
  const std::uint64_t count = rows.first_token + tokens - layer.last_first;
  if (count <= most) return;
  layer.last.erase(layer.last.begin(),
                   layer.last.begin() + static_cast<std::ptrdiff_t>((count - most) * token_bytes));
  layer.last_first += count - most;
}

void Observer::SeeNorms(const ObservedRows& rows, std::uint64_t tokens, Layer& layer) {
  if (needs_.norm_share() == 0) return;
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t row_bytes = RowBytes(geometry);
  layer.norms.resize(geometry.query_heads);
  const std::uint64_t most = rows.prompt_tokens == 0
                                 ? ~std::uint64_t{0}
                                 : CountUp(needs_.norm_share(), rows.prompt_tokens);
  for (std::uint32_t head = 0; head < geometry.query_heads; ++head) {
    HeadRows& kept = layer.norms[head];
    for (std::uint64_t token = 0; token < tokens; ++token) {
      const std::byte* const row =
          rows.query.data() + (token * geometry.query_heads + head) * row_bytes;
      const double norm = SquaredNorm(row, geometry.head_dim, geometry.type);
      kept[rows.first_token + token] = {norm, std::vector<std::byte>(row, row + row_bytes)};
      if (kept.size() <= most) continue;
      // The weakest goes, of equal ones the last.
      auto weakest = kept.begin();
      for (auto it = kept.begin(); it != kept.end(); ++it) {
        if (it->second.norm <= weakest->second.norm) weakest = it;
      }
      kept.erase(weakest);
    }
  }
}

void Observer::SeeSums(const ObservedRows& rows, std::uint64_t tokens,
                       const kernels::Operations& operations, Layer& layer) {
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t row_bytes = RowBytes(geometry);
  if (layer.keys.empty()) {
    layer.sums_first = rows.first_token;
    layer.keys.resize(geometry.kv_heads);
    layer.sums.resize(geometry.kv_heads);
  }
  const std::uint64_t before = rows.first_token - layer.sums_first;
  std::vector<std::uint64_t> visible_end;
  for (std::uint64_t token = 0; token < tokens; ++token) visible_end.push_back(before + token + 1);
  std::vector<std::uint64_t> visible_begin;
  for (const std::uint64_t end : visible_end) {
    const std::uint64_t window = geometry.sliding_window;
    visible_begin.push_back(window != 0 && end > window ? end - window : 0);
  }
  std::vector<float> scratch(kernels::kObserveRows * (before + tokens));
  for (std::uint32_t kv_head = 0; kv_head < geometry.kv_heads; ++kv_head) {
    std::vector<std::byte>& keys = layer.keys[kv_head];
    for (std::uint64_t token = 0; token < tokens; ++token) {
      const std::byte* const row =
          rows.key.data() + (token * geometry.kv_heads + kv_head) * row_bytes;
      keys.insert(keys.end(), row, row + row_bytes);
    }
    layer.sums[kv_head].resize(before + tokens, 0.0);
    std::vector<double> paid(before + tokens, 0.0);
    for (std::uint32_t i = 0; i < geometry.group(); ++i) {
      const std::uint32_t head = kv_head * geometry.group() + i;
      operations.observe({.keys = keys.data(),
                          .key_stride = row_bytes,
                          .key_count = before + tokens,
                          .queries = rows.query.data() + head * row_bytes,
                          .query_stride = geometry.query_heads * row_bytes,
                          .query_count = static_cast<std::uint32_t>(tokens),
                          .visible_begin = visible_begin.data(),
                          .visible_end = visible_end.data(),
                          .head_dim = geometry.head_dim,
                          .type = geometry.type,
                          .scale = geometry.scale,
                          .logit_softcap = geometry.logit_softcap,
                          .logits = false,
                          .scratch = scratch.data(),
                          .sums = paid.data()});
    }
    for (std::uint64_t token = 0; token < paid.size(); ++token) {
      layer.sums[kv_head][token] += paid[token] / geometry.group();
    }
  }
}

void Observer::SeeDecoded(std::uint32_t index, std::uint64_t first_token,
                          std::span<const std::byte> query) {
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  Layer& layer = layers_[index];
  // What has a gap before it says nothing of the tokens before the gap.
  if (first_token < layer.next) ForgetFrom(first_token, index);
  if (first_token > layer.next) layer.last.clear();
  SeeLast({.layer = index, .first_token = first_token, .query = query}, query.size() / token_bytes,
          layer);
  layer.next = first_token + query.size() / token_bytes;
}

void Observer::SeeTokens(std::uint64_t first_token, std::span<const std::uint32_t> ids) {
  if (!needs_.token_ids()) return;
  if (ids_.empty() || first_token < first_id_ || first_token > first_id_ + ids_.size()) {
    first_id_ = first_token;
    ids_.clear();
  }
  ids_.resize(first_token - first_id_);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
}

void Observer::FillNorms(const kernels::LayerGeometry& geometry, const Layer& layer,
                         v1::ObserveRequest& request) const {
  std::string bytes;
  std::uint64_t count = CountUp(needs_.norm_share(), layer.next);
  for (const HeadRows& head : layer.norms) count = std::min<std::uint64_t>(count, head.size());
  for (const HeadRows& head : layer.norms) {
    std::vector<std::pair<double, std::uint64_t>>
        order;  // strongest first, then the lower position
    for (const auto& [position, row] : head) order.emplace_back(-row.norm, position);
    std::sort(order.begin(), order.end());
    order.resize(count);
    std::sort(order.begin(), order.end(),
              [](const auto& a, const auto& b) { return a.second < b.second; });
    for (const auto& [norm, position] : order) {
      request.add_norm_positions(position);
      const std::vector<std::byte>& row = head.at(position).row;
      bytes.append(reinterpret_cast<const char*>(row.data()), row.size());
    }
  }
  if (count == 0) return;
  *request.mutable_norm_queries() =
      Inline(ToDType(geometry.type), {geometry.query_heads, count, geometry.head_dim});
  request.mutable_norm_queries()->set_inline_(std::move(bytes));
}

absl::Status Observer::Show(Session& session, SequenceId sequence, std::uint32_t first_layer,
                            std::uint32_t layers) {
  if (absl::Status status = ShowTokens(session, sequence); !status.ok()) return status;
  const auto behind = [&](std::uint32_t layer) {
    return layers != 0 && layer >= first_layer + layers;
  };
  for (auto it = layers_.lower_bound(first_layer); it != layers_.end() && !behind(it->first);) {
    absl::Status status = ShowLayer(session, sequence, it->first, it->second);
    if (!status.ok()) return status;
    it = layers_.erase(it);
  }
  return absl::OkStatus();
}

absl::Status Observer::ShowTokens(Session& session, SequenceId sequence) {
  if (ids_.empty()) return absl::OkStatus();
  v1::ObserveRequest request;
  request.set_sequence_id(sequence.value());
  request.set_first_token_id(first_id_);
  request.mutable_token_ids()->Add(ids_.begin(), ids_.end());
  v1::ObserveResponse response;
  if (absl::Status status = session.Call(request, response); !status.ok()) return status;
  ids_.clear();
  return absl::OkStatus();
}

absl::Status Observer::ShowLayer(Session& session, SequenceId sequence, std::uint32_t index,
                                 const Layer& layer) const {
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  v1::ObserveRequest request;
  request.set_sequence_id(sequence.value());
  request.set_layer(index);
  if (!layer.last.empty()) {
    const std::uint64_t rows = layer.last.size() / (geometry.query_heads * RowBytes(geometry));
    *request.mutable_last_queries() =
        Inline(ToDType(geometry.type), {rows, geometry.query_heads, geometry.head_dim});
    request.mutable_last_queries()->set_inline_(layer.last.data(), layer.last.size());
    request.set_first_query_position(layer.last_first);
  }
  if (!layer.norms.empty()) FillNorms(geometry, layer, request);
  if (!layer.sums.empty()) {
    std::vector<float> sums;
    for (const std::vector<double>& head : layer.sums) {
      sums.insert(sums.end(), head.begin(), head.end());
    }
    *request.mutable_attention_sums() =
        Inline(v1::DTYPE_FP32, {layer.sums.size(), layer.sums.front().size()});
    request.mutable_attention_sums()->set_inline_(sums.data(), sums.size() * sizeof(float));
    request.set_first_sum_position(layer.sums_first);
  }
  if (!request.has_last_queries() && !request.has_norm_queries() && !request.has_attention_sums()) {
    return absl::OkStatus();
  }
  const std::uint64_t most = session.welcome().max_message_bytes();
  if (request.ByteSizeLong() > most) {
    return absl::ResourceExhaustedError(
        Concat("what layer ", index, " is to show has ", request.ByteSizeLong(),
               " bytes; the daemon's largest message has ", most, ": raise max_message_bytes"));
  }
  v1::ObserveResponse response;
  return session.Call(request, response);
}

}  // namespace tessera::client
