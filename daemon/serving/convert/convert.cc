#include "daemon/serving/convert/convert.h"

#include <algorithm>
#include <string>
#include <utility>

#include "daemon/base/strings.h"
#include "kernels/format/element.h"

namespace tessera::serving {

namespace {

std::string ShapeText(const auto& shape) {
  constexpr int kMost = 8;
  const int size = static_cast<int>(shape.size());
  std::string text = "[";
  for (int i = 0; i < std::min(size, kMost); ++i) Append(text, i == 0 ? "" : ", ", shape[i]);
  if (size > kMost) Append(text, ", ... ", size, " dimensions");
  return text + "]";
}

absl::Status CheckShape(const v1::Tensor& tensor, const TensorRule& rule) {
  bool fits = tensor.shape_size() == static_cast<int>(rule.shape.size());
  for (int i = 0; fits && i < tensor.shape_size(); ++i) {
    fits = rule.shape[i] == 0 ? tensor.shape(i) > 0 : tensor.shape(i) == rule.shape[i];
  }
  if (fits) return absl::OkStatus();
  std::string wanted = "[";
  for (std::size_t i = 0; i < rule.shape.size(); ++i) {
    Append(wanted, i == 0 ? "" : ", ");
    rule.shape[i] == 0 ? Append(wanted, "any") : Append(wanted, rule.shape[i]);
  }
  return absl::InvalidArgumentError(Concat(rule.name, " has shape ", ShapeText(tensor.shape()),
                                           "; expected ", wanted, "], laid out as ", rule.layout));
}

}  // namespace

absl::StatusOr<kernels::ElementType> ToElementType(v1::DType dtype, std::string_view what) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return kernels::ElementType::kBf16;
    case v1::DTYPE_FP16:
      return kernels::ElementType::kFp16;
    case v1::DTYPE_FP32:
      return kernels::ElementType::kFp32;
    default:
      return absl::InvalidArgumentError(Concat(what, ": dtype ", static_cast<int>(dtype),
                                               " is not supported; use BF16 (1), FP16 (2) or "
                                               "FP32 (3)"));
  }
}

v1::DType ToDType(kernels::ElementType type) { return static_cast<v1::DType>(type); }
static_assert(static_cast<int>(kernels::ElementType::kBf16) == v1::DTYPE_BF16);
static_assert(static_cast<int>(kernels::ElementType::kFp16) == v1::DTYPE_FP16);
static_assert(static_cast<int>(kernels::ElementType::kFp32) == v1::DTYPE_FP32);

namespace {

// As cache::BytesOf counts the spec.
std::uint64_t SpecBytesOf(const v1::ModelGeometry& geometry) {
  const auto size = [](int count) { return static_cast<std::uint64_t>(count); };
  const auto rope_bytes = [&](const v1::Rope& rope) {
    return rope.scaling().size() + size(rope.frequency_size()) * sizeof(double);
  };
  std::uint64_t bytes = geometry.name().size() + geometry.weights_id().size() +
                        geometry.adapter_id().size() + rope_bytes(geometry.rope()) +
                        size(geometry.layers_size()) * sizeof(cache::LayerSpec) +
                        size(geometry.delimiter_token_ids_size()) * sizeof(std::uint32_t);
  for (const v1::LayerGeometry& layer : geometry.layers()) {
    bytes += size(layer.sinks_size()) * sizeof(float) + rope_bytes(layer.rope());
  }
  return bytes;
}

cache::RopeSpec ToRopeSpec(const v1::Rope& rope) {
  return {.theta = rope.theta(),
          .interleaved = rope.interleaved(),
          .scaling = rope.scaling(),
          .scaling_factor = rope.scaling_factor(),
          .frequencies = {rope.frequency().begin(), rope.frequency().end()}};
}

}  // namespace

absl::StatusOr<cache::ModelSpec> ToModelSpec(const v1::ModelGeometry& geometry) {
  absl::StatusOr<kernels::ElementType> type = ToElementType(geometry.dtype(), "model");
  if (!type.ok()) return type.status();
  // Before any list is copied.
  if (absl::Status status = cache::CheckLayerCount(geometry.layers_size()); !status.ok()) {
    return status;
  }
  if (absl::Status status = cache::CheckSpecBytes(SpecBytesOf(geometry)); !status.ok()) {
    return status;
  }
  cache::ModelSpec spec;
  spec.name = geometry.name();
  spec.type = *type;
  for (const v1::LayerGeometry& layer : geometry.layers()) {
    spec.layers.push_back({.query_heads = layer.query_heads(),
                           .kv_heads = layer.kv_heads(),
                           .head_dim = layer.head_dim(),
                           .value_head_dim = layer.value_head_dim(),
                           .scale = layer.scale(),
                           .sliding_window = layer.sliding_window(),
                           .logit_softcap = layer.logit_softcap(),
                           .sinks = {layer.sinks().begin(), layer.sinks().end()}});
    if (layer.has_rope()) spec.layers.back().rope = ToRopeSpec(layer.rope());
  }
  spec.delimiter_token_ids = {geometry.delimiter_token_ids().begin(),
                              geometry.delimiter_token_ids().end()};
  cache::RopeSpec rope = ToRopeSpec(geometry.rope());
  spec.rope_theta = rope.theta;
  spec.rope_interleaved = rope.interleaved;
  spec.rope_scaling = std::move(rope.scaling);
  spec.rope_scaling_factor = rope.scaling_factor;
  spec.rope_frequencies = std::move(rope.frequencies);
  spec.weights_id = geometry.weights_id();
  spec.adapter_id = geometry.adapter_id();
  return spec;
}

absl::StatusOr<std::uint32_t> CountLayers(const cache::Model& model, std::uint32_t first_layer,
                                          std::uint32_t layers) {
  if (first_layer >= model.layers()) {
    return absl::InvalidArgumentError(
        Concat("first_layer is ", first_layer, "; the model has ", model.layers(), " layers"));
  }
  const std::uint32_t left = model.layers() - first_layer;
  if (layers > left) {
    return absl::InvalidArgumentError(Concat("layers is ", layers, " from first_layer ",
                                             first_layer, "; the model has ", model.layers(),
                                             " layers"));
  }
  return layers == 0 ? left : layers;
}

absl::Status CheckSameShape(const cache::Model& model, std::uint32_t first_layer,
                            std::uint32_t layers) {
  const kernels::LayerGeometry geometry = model.geometry(first_layer);
  for (std::uint32_t i = 1; i < layers; ++i) {
    const kernels::LayerGeometry other = model.geometry(first_layer + i);
    if (other.kv_heads == geometry.kv_heads && other.head_dim == geometry.head_dim) continue;
    return absl::InvalidArgumentError(
        Concat("layers ", first_layer, " and ", first_layer + i,
               " differ in kv heads or head_dim; send them in separate calls"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorBytes> Resolve(const v1::Tensor& tensor, const TensorRule& rule,
                                    const cache::SessionState& session) {
  absl::StatusOr<kernels::ElementType> type = ToElementType(tensor.dtype(), rule.name);
  if (!type.ok()) return type.status();
  if (*type != rule.type) {
    return absl::InvalidArgumentError(Concat(rule.name, " is ", kernels::ElementName(*type),
                                             "; the model is ", kernels::ElementName(rule.type)));
  }
  if (absl::Status status = CheckShape(tensor, rule); !status.ok()) return status;
  std::uint64_t bytes = kernels::ElementBytes(rule.type);
  for (std::uint64_t dimension : tensor.shape()) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      return absl::InvalidArgumentError(Concat(rule.name, " has shape ", ShapeText(tensor.shape()),
                                               ", which is more than 2^64 bytes"));
    }
  }
  const std::uint64_t given = tensor.data_case() == v1::Tensor::kStaging ? tensor.staging().bytes()
                                                                         : tensor.inline_().size();
  if (given != bytes) {
    return absl::InvalidArgumentError(Concat(rule.name, " has ", given, " bytes; its shape ",
                                             ShapeText(tensor.shape()), " needs ", bytes));
  }
  TensorBytes resolved = {
      device::Place::kHost, nullptr, {tensor.shape().begin(), tensor.shape().end()}, bytes};
  if (tensor.data_case() == v1::Tensor::kStaging) {
    absl::StatusOr<const std::byte*> data = session.StagingRange(tensor.staging().offset(), bytes);
    if (!data.ok()) return data.status();
    resolved.place = device::Place::kDevice;
    resolved.data = *data;
  } else {
    resolved.data = reinterpret_cast<const std::byte*>(tensor.inline_().data());
  }
  return resolved;
}

}  // namespace tessera::serving
