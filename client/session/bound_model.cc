#include "client/session/bound_model.h"

#include <cmath>
#include <utility>

#include "client/session/kernel_types.h"
#include "daemon/base/strings.h"
#include "kernels/format/dense_tile.h"

namespace tessera::client {

namespace {

constexpr std::size_t kMaxLayers = 1024;
constexpr std::uint32_t kMaxHeads = 1024;

std::vector<shm::LayerShape> Shapes(const ModelGeometry& geometry) {
  std::vector<shm::LayerShape> shapes;
  for (const LayerGeometry& layer : geometry.layers) {
    shapes.push_back({layer.kv_heads, layer.head_dim});
  }
  return shapes;
}

std::vector<std::vector<float>> Sinks(const ModelGeometry& geometry) {
  std::vector<std::vector<float>> sinks;
  for (const LayerGeometry& layer : geometry.layers) sinks.push_back(layer.sinks);
  return sinks;
}

void FillRope(const Rope& rope, v1::Rope& out) {
  out.set_theta(rope.theta);
  out.set_interleaved(rope.interleaved);
  out.set_scaling(rope.scaling);
  out.set_scaling_factor(rope.scaling_factor);
  out.mutable_frequency()->Add(rope.frequencies.begin(), rope.frequencies.end());
}

absl::Status CheckLayer(std::size_t index, const LayerGeometry& layer) {
  const auto refuse = [index](const auto&... text) {
    return absl::InvalidArgumentError(Concat("layer ", index, ": ", text...));
  };
  if (layer.kv_heads == 0 || layer.kv_heads > kMaxHeads) {
    return refuse("kv_heads is ", layer.kv_heads, "; supported values are 1 to ", kMaxHeads);
  }
  if (layer.query_heads == 0 || layer.query_heads > kMaxHeads ||
      layer.query_heads % layer.kv_heads != 0) {
    return refuse("query_heads is ", layer.query_heads, "; supported values are 1 to ", kMaxHeads,
                  ", and multiples of kv_heads ", layer.kv_heads);
  }
  if (!kernels::IsHeadDim(layer.head_dim)) {
    return refuse("head_dim is ", layer.head_dim, "; supported values are 64, 128 and 256");
  }
  if (!layer.sinks.empty() && layer.sinks.size() != layer.query_heads) {
    return refuse("sinks has ", layer.sinks.size(), " values; set ", layer.query_heads,
                  ", one per query head, or none");
  }
  return absl::OkStatus();
}

}  // namespace

v1::DType ToDType(kernels::ElementType type) { return static_cast<v1::DType>(type); }
static_assert(static_cast<int>(kernels::ElementType::kBf16) == v1::DTYPE_BF16);
static_assert(static_cast<int>(kernels::ElementType::kFp16) == v1::DTYPE_FP16);
static_assert(static_cast<int>(kernels::ElementType::kFp32) == v1::DTYPE_FP32);

v1::ModelGeometry ToProto(const ModelGeometry& geometry) {
  v1::ModelGeometry proto;
  proto.set_name(geometry.name);
  proto.set_dtype(ToDType(ToKernels(geometry.type)));
  for (const LayerGeometry& layer : geometry.layers) {
    v1::LayerGeometry& out = *proto.add_layers();
    out.set_query_heads(layer.query_heads);
    out.set_kv_heads(layer.kv_heads);
    out.set_head_dim(layer.head_dim);
    out.set_value_head_dim(layer.value_head_dim);
    out.set_scale(layer.scale);
    out.set_sliding_window(layer.sliding_window);
    out.set_logit_softcap(layer.logit_softcap);
    out.mutable_sinks()->Add(layer.sinks.begin(), layer.sinks.end());
    if (layer.rope.has_value()) FillRope(*layer.rope, *out.mutable_rope());
  }
  FillRope(geometry.rope, *proto.mutable_rope());
  proto.set_weights_id(geometry.weights_id);
  proto.set_adapter_id(geometry.adapter_id);
  proto.mutable_delimiter_token_ids()->Add(geometry.delimiter_token_ids.begin(),
                                           geometry.delimiter_token_ids.end());
  return proto;
}

absl::Status BoundModel::Check(const ModelGeometry& geometry) {
  if (!kernels::IsElementType(static_cast<std::uint8_t>(geometry.type))) {
    return absl::InvalidArgumentError(
        Concat("the model's type is ", static_cast<int>(geometry.type),
               "; supported types are bf16 (1), fp16 (2) and fp32 (3)"));
  }
  if (geometry.layers.empty() || geometry.layers.size() > kMaxLayers) {
    return absl::InvalidArgumentError(Concat("the model has ", geometry.layers.size(),
                                             " layers; supported are 1 to ", kMaxLayers));
  }
  std::uint64_t lanes = 0;
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    if (absl::Status status = CheckLayer(i, geometry.layers[i]); !status.ok()) return status;
    lanes += geometry.layers[i].kv_heads;
  }
  if (lanes > shm::kMaxLanes) {
    return absl::InvalidArgumentError(Concat(
        "the model has ", lanes, " lanes (kv heads of all layers); the limit is ", shm::kMaxLanes));
  }
  return absl::OkStatus();
}

BoundModel::BoundModel(ModelId id, const ModelGeometry& geometry, std::uint32_t ring_tiles)
    : id_(id),
      type_(ToKernels(geometry.type)),
      layout_(type_, ring_tiles, Shapes(geometry)),
      sinks_(Sinks(geometry)) {
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    const LayerGeometry& layer = geometry.layers[i];
    geometry_.push_back(
        {.query_heads = layer.query_heads,
         .kv_heads = layer.kv_heads,
         .head_dim = layer.head_dim,
         .type = type_,
         // The daemon computes the default in the same way: both transports must agree to the bit.
         .scale =
             layer.scale != 0 ? layer.scale : 1.0f / std::sqrt(static_cast<float>(layer.head_dim)),
         .sliding_window = layer.sliding_window,
         .logit_softcap = layer.logit_softcap,
         .sinks = sinks_[i].empty() ? nullptr : sinks_[i].data()});
  }
}

}  // namespace tessera::client
