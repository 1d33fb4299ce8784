#include "daemon/cache/model/model.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/cache/model/prefix_hash.h"
#include "kernels/strategy/files/book_file.h"

namespace tessera::cache {

namespace {

absl::Status Refuse(std::uint32_t layer, const auto&... text) {
  return absl::InvalidArgumentError(Concat("layer ", layer, ": ", text...));
}

absl::Status CheckHeads(std::uint32_t index, const LayerSpec& layer) {
  if (layer.kv_heads == 0 || layer.kv_heads > kMaxHeads) {
    return Refuse(index, "kv_heads is ", layer.kv_heads, "; supported values are 1 to ", kMaxHeads);
  }
  if (layer.query_heads == 0 || layer.query_heads > kMaxHeads) {
    return Refuse(index, "query_heads is ", layer.query_heads, "; supported values are 1 to ",
                  kMaxHeads);
  }
  if (layer.query_heads % layer.kv_heads != 0) {
    return Refuse(index, "query_heads ", layer.query_heads, " is not a multiple of kv_heads ",
                  layer.kv_heads);
  }
  if (!kernels::IsHeadDim(layer.head_dim)) {
    return Refuse(index, "head_dim is ", layer.head_dim, "; supported values are 64, 128 and 256");
  }
  if (layer.value_head_dim != 0 && layer.value_head_dim != layer.head_dim) {
    return absl::UnimplementedError(Concat(
        "layer ", index, ": value_head_dim ", layer.value_head_dim, " differs from head_dim ",
        layer.head_dim, "; K and V of different widths are not supported"));
  }
  return absl::OkStatus();
}

absl::Status CheckAttention(std::uint32_t index, const LayerSpec& layer) {
  if (!std::isfinite(layer.scale) || layer.scale < 0) {
    return Refuse(index, "scale is ", layer.scale, "; it must be positive and finite, or 0");
  }
  if (!std::isfinite(layer.logit_softcap) || layer.logit_softcap < 0) {
    return Refuse(index, "logit_softcap is ", layer.logit_softcap,
                  "; it must be positive and finite, or 0");
  }
  if (!layer.sinks.empty() && layer.sinks.size() != layer.query_heads) {
    return Refuse(index, layer.sinks.size(), " sinks given; expected ", layer.query_heads,
                  " (one per query head) or none");
  }
  for (float sink : layer.sinks) {
    if (!std::isfinite(sink)) return Refuse(index, "a sink is ", sink, "; it must be finite");
  }
  return absl::OkStatus();
}

// Keeps angles exact: even for positions 2^32 apart, the angle stays far below the range in which a
// double loses its fraction.
constexpr double kMaxFrequency = 1024;

// `where` begins the message: "" or "layer 3: ".
absl::Status CheckRope(const RopeSpec& rope, const std::string& where) {
  if (rope.scaling.size() > kMaxScalingBytes) {
    return absl::InvalidArgumentError(Concat(where, "rope scaling has ", rope.scaling.size(),
                                             " bytes; the limit is ", kMaxScalingBytes));
  }
  if (!std::isfinite(rope.theta) || rope.theta < 0 || !std::isfinite(rope.scaling_factor)) {
    return absl::InvalidArgumentError(
        Concat(where, "rope theta ", rope.theta, ", scaling factor ", rope.scaling_factor,
               "; both must be finite, and theta must not be negative"));
  }
  for (std::size_t i = 0; i < rope.frequencies.size(); ++i) {
    const double frequency = rope.frequencies[i];
    if (frequency >= 0 && frequency <= kMaxFrequency) continue;  // not NaN
    return absl::InvalidArgumentError(Concat(where, "rope frequency ", i, " is ", frequency,
                                             "; it must be between 0 and ", kMaxFrequency,
                                             ", in radians per position"));
  }
  // Frequencies derived from theta range from 1 down to almost 1 / theta.
  const double factor = rope.scaling_factor > 0 ? rope.scaling_factor : 1;
  if (rope.theta <= 0 || std::max(1.0, 1 / rope.theta) / factor <= kMaxFrequency) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      Concat(where, "rope theta ", rope.theta, " with scaling factor ", rope.scaling_factor,
             " yields frequencies above ", kMaxFrequency, " radians per position"));
}

// The model's RoPE applies to layers of one head_dim.
absl::Status CheckRopes(const ModelSpec& spec) {
  if (absl::Status status = CheckRope(spec.rope(), ""); !status.ok()) return status;
  std::optional<std::size_t> first;  // layer with the model's RoPE
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    const LayerSpec& layer = spec.layers[i];
    if (layer.rope.has_value()) {
      absl::Status status = CheckRope(*layer.rope, Concat("layer ", i, ": "));
      if (!status.ok()) return status;
    } else if (!spec.rope_frequencies.empty()) {
      first = first.value_or(i);
      if (layer.head_dim != spec.layers[*first].head_dim) {
        return absl::InvalidArgumentError(
            Concat("rope frequencies require one head_dim for all layers; layer ", i, " has ",
                   layer.head_dim, ", layer ", *first, " has ", spec.layers[*first].head_dim));
      }
    }
    const std::size_t count =
        layer.rope.has_value() ? layer.rope->frequencies.size() : spec.rope_frequencies.size();
    if (count <= layer.head_dim / 2) continue;
    return absl::InvalidArgumentError(Concat(count, " rope frequencies given; layer ", i,
                                             " has only ", layer.head_dim / 2, " channel pairs"));
  }
  return absl::OkStatus();
}

absl::Status CheckIds(const ModelSpec& spec) {
  for (const auto& [name, id] :
       {std::pair("weights_id", &spec.weights_id), std::pair("adapter_id", &spec.adapter_id)}) {
    if (id->size() <= kMaxIdBytes) continue;
    return absl::InvalidArgumentError(Concat("the model's ", name, " has ", id->size(),
                                             " bytes; the limit is ", kMaxIdBytes, "; use a hash"));
  }
  return absl::OkStatus();
}

absl::Status CheckWhole(const ModelSpec& spec) {
  if (spec.name.empty() || spec.name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(Concat("the model's name has ", spec.name.size(),
                                             " bytes; allowed are 1 to ", kMaxNameBytes));
  }
  if (absl::Status status = CheckLayerCount(spec.layers.size()); !status.ok()) return status;
  if (!kernels::IsElementType(static_cast<std::uint8_t>(spec.type))) {
    return absl::InvalidArgumentError(
        Concat("the model's element type is ", static_cast<std::uint32_t>(spec.type),
               "; supported types are bf16 (1), fp16 (2) and fp32 (3)"));
  }
  if (spec.delimiter_token_ids.size() > kMaxDelimiters) {
    return absl::InvalidArgumentError(Concat(spec.delimiter_token_ids.size(),
                                             " delimiter tokens; the limit is ", kMaxDelimiters));
  }
  if (absl::Status status = CheckIds(spec); !status.ok()) return status;
  if (absl::Status status = CheckSpecBytes(BytesOf(spec)); !status.ok()) return status;
  return CheckRopes(spec);
}

void AppendRope(const RopeSpec& rope, std::string& text) {
  Append(text, "\nrope ", rope.theta, " ", rope.interleaved ? 1 : 0, " ", rope.scaling.size(), " ",
         rope.scaling, " ", rope.scaling_factor);
  for (const double frequency : rope.frequencies) Append(text, " ", frequency);
}

// Covers every field: two specs that differ have different texts.
std::string FingerprintOf(const ModelSpec& spec) {
  std::string text = Concat("type ", static_cast<int>(spec.type));
  for (const LayerSpec& layer : spec.layers) {
    Append(text, "\nlayer ", layer.query_heads, " ", layer.kv_heads, " ", layer.head_dim, " ",
           layer.value_head_dim, " ", layer.scale, " ", layer.sliding_window, " ",
           layer.logit_softcap);
    for (const float sink : layer.sinks) Append(text, " ", sink);
  }
  AppendRope(spec.rope(), text);
  Append(text, "\ndelimiters");
  for (const std::uint32_t id : spec.delimiter_token_ids) Append(text, " ", id);
  // Models without these have the fingerprints that they had before these existed.
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    if (!spec.layers[i].rope.has_value()) continue;
    Append(text, "\nlayer ", i);
    AppendRope(*spec.layers[i].rope, text);
  }
  if (!spec.weights_id.empty() || !spec.adapter_id.empty()) {
    Append(text, "\nweights ", spec.weights_id.size(), " ", spec.weights_id, "\nadapter ",
           spec.adapter_id.size(), " ", spec.adapter_id);
  }
  const Hash128 hash = NewPrefixHash(0)(Hash128(), text.data(), text.size());
  std::string digits;
  for (const std::uint64_t word : {hash.high, hash.low}) {
    for (int shift = 60; shift >= 0; shift -= 4) digits += "0123456789abcdef"[word >> shift & 15];
  }
  return digits;
}

kernels::BookedModel BookedModelOf(const ModelSpec& spec) {
  kernels::BookedModel model = {.layers = {},
                                .rope_theta = spec.rope_theta,
                                .rope_interleaved = spec.rope_interleaved,
                                .rope_scaling = spec.rope_scaling,
                                .rope_scaling_factor = spec.rope_scaling_factor,
                                .rope_frequencies = spec.rope_frequencies};
  for (const LayerSpec& layer : spec.layers) {
    model.layers.push_back({layer.query_heads, layer.kv_heads, layer.head_dim});
  }
  return model;
}

}  // namespace

absl::Status CheckLayerCount(std::uint64_t layers) {
  if (layers > 0 && layers <= kMaxLayers) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("the model has ", layers, " layers; allowed are 1 to ", kMaxLayers));
}

absl::Status CheckSpecBytes(std::uint64_t bytes) {
  if (bytes <= kMaxSpecBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat("the model's description takes ", bytes,
                                           " bytes, most of them sinks, frequencies and delimiter "
                                           "tokens; the limit is ",
                                           kMaxSpecBytes));
}

std::uint64_t BytesOf(const ModelSpec& spec) {
  std::uint64_t bytes = spec.name.size() + spec.weights_id.size() + spec.adapter_id.size() +
                        spec.rope_scaling.size() + spec.layers.size() * sizeof(LayerSpec) +
                        spec.delimiter_token_ids.size() * sizeof(std::uint32_t) +
                        spec.rope_frequencies.size() * sizeof(double);
  for (const LayerSpec& layer : spec.layers) {
    bytes += layer.sinks.size() * sizeof(float);
    if (!layer.rope.has_value()) continue;
    bytes += layer.rope->scaling.size() + layer.rope->frequencies.size() * sizeof(double);
  }
  return bytes;
}

std::uint64_t Model::bytes() const {
  // The layout has a few words for each layer.
  return sizeof(Model) + BytesOf(spec_) + layers() * sizeof(shm::LayerShape) * 4;
}

Model::Model(ModelId id, ModelSpec spec, shm::LaneLayout layout)
    : id_(id),
      spec_(std::move(spec)),
      fingerprint_(FingerprintOf(spec_)),
      book_fingerprint_(kernels::FingerprintOf(BookedModelOf(spec_))),
      layout_(std::move(layout)) {}

absl::StatusOr<Model> Model::Create(ModelId id, ModelSpec spec, std::uint32_t ring_tiles) {
  if (absl::Status status = CheckWhole(spec); !status.ok()) return status;
  std::vector<shm::LayerShape> shapes;
  std::uint64_t lanes = 0;
  for (std::uint32_t i = 0; i < spec.layers.size(); ++i) {
    LayerSpec& layer = spec.layers[i];
    if (absl::Status status = CheckHeads(i, layer); !status.ok()) return status;
    if (absl::Status status = CheckAttention(i, layer); !status.ok()) return status;
    if (layer.scale == 0) layer.scale = 1.0f / std::sqrt(static_cast<float>(layer.head_dim));
    layer.value_head_dim = layer.head_dim;
    shapes.push_back({layer.kv_heads, layer.head_dim});
    lanes += layer.kv_heads;
  }
  if (lanes > shm::kMaxLanes) {
    return absl::InvalidArgumentError(Concat(
        "the model has ", lanes, " lanes (kv heads of all layers); the limit is ", shm::kMaxLanes));
  }
  shm::LaneLayout layout(spec.type, ring_tiles, shapes);
  return Model(id, std::move(spec), std::move(layout));
}

kernels::LayerGeometry Model::geometry(std::uint32_t layer) const {
  const LayerSpec& spec = spec_.layers[layer];
  return {.query_heads = spec.query_heads,
          .kv_heads = spec.kv_heads,
          .head_dim = spec.head_dim,
          .type = spec_.type,
          .scale = spec.scale,
          .sliding_window = spec.sliding_window,
          .logit_softcap = spec.logit_softcap,
          .sinks = spec.sinks.empty() ? nullptr : spec.sinks.data()};
}

}  // namespace tessera::cache
