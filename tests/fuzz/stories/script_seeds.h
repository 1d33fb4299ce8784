// Valid messages for the seeds of scripts. Ids are placeholders (daemon_script.h).
#pragma once

#include <cstdint>
#include <string>

#include "tests/fuzz/stories/daemon_script.h"

namespace tessera::fuzz {

// A tensor of this shape, whose numbers are made from one or two bytes.
inline v1::Tensor ShortTensor(std::initializer_list<std::uint64_t> shape, std::string seed = "a") {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_BF16);
  for (const std::uint64_t extent : shape) tensor.add_shape(extent);
  tensor.set_inline_(std::move(seed));
  return tensor;
}

inline v1::AttachRequest SeedHello() {
  v1::AttachRequest request;
  request.mutable_hello()->set_layout_fingerprint(1);
  return request;
}

inline constexpr std::uint32_t kSeedLayers = 2;

inline v1::RegisterModelRequest SeedModel() {
  v1::RegisterModelRequest request;
  request.mutable_model()->set_name("m");
  request.mutable_model()->set_dtype(v1::DTYPE_BF16);
  request.mutable_model()->mutable_rope()->set_theta(10000);
  request.mutable_model()->add_delimiter_token_ids(7);
  for (std::uint32_t i = 0; i < kSeedLayers; ++i) {
    v1::LayerGeometry& layer = *request.mutable_model()->add_layers();
    layer.set_query_heads(2);
    layer.set_kv_heads(1);
    layer.set_head_dim(64);
  }
  return request;
}

inline v1::CreateSequenceRequest SeedSequence(const std::string& policy) {
  v1::CreateSequenceRequest request;
  request.set_policy(policy);
  return request;
}

// Starts a script with a worker, a model and a sequence.
inline ScriptWriter Begun(const std::string& policy) {
  ScriptWriter script;
  script.Add(Op::kAttach, SeedHello());
  script.Add(Op::kRegisterModel, SeedModel());
  script.Add(Op::kCreateSequence, SeedSequence(policy));
  return script;
}

inline v1::AppendRequest SeedAppend(std::uint64_t first, std::uint64_t tokens) {
  v1::AppendRequest request;
  request.set_first_token(first);
  *request.mutable_key() = ShortTensor({kSeedLayers, tokens, 1, 64}, "k");
  *request.mutable_value() = ShortTensor({kSeedLayers, tokens, 1, 64}, "v");
  return request;
}

inline v1::AttendRequest SeedAttend() {
  v1::AttendRequest request;
  *request.add_items()->mutable_query() = ShortTensor({1, 2, 64});
  return request;
}

// Observes everything that policies may ask for, in one request per layer after another.
inline void SeedObserve(std::uint64_t tokens, ScriptWriter& script) {
  for (std::uint32_t layer = 0; layer < kSeedLayers; ++layer) {
    v1::ObserveRequest request;
    request.set_layer(layer);
    v1::ObserveRequest shown = request;
    *shown.mutable_last_queries() = ShortTensor({32, 2, 64});
    shown.set_first_query_position(tokens - 32);
    script.Add(Op::kObserve, shown);
    shown = request;
    *shown.mutable_norm_queries() = ShortTensor({2, 4, 64});
    for (std::uint64_t i = 0; i < 8; ++i) shown.add_norm_positions(i % 4 * 5);
    script.Add(Op::kObserve, shown);
    shown = request;
    v1::Tensor& sums = *shown.mutable_attention_sums() = ShortTensor({1, tokens}, "s");
    sums.set_dtype(v1::DTYPE_FP32);
    script.Add(Op::kObserve, shown);
    shown = request;
    for (std::uint32_t i = 0; i < tokens; ++i) shown.add_token_ids(i % 9);
    script.Add(Op::kObserve, shown);
  }
}

template <typename Request>
Request TokenIds(Request request, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) request.add_token_ids(i);
  return request;
}

}  // namespace tessera::fuzz
