// The geometry of a model, validated once at registration, and the lane layout that follows from
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/ids.h"
#include "kernels/dispatch/attend.h"
#include "proto/shm/lane_layout.h"

namespace tessera::cache {

// Rotary position embedding.
struct RopeSpec {
  double theta = 0;  // 0: no rotary positions
  bool interleaved = false;
  std::string scaling;
  double scaling_factor = 0;
  std::vector<double> frequencies;  // per channel pair; empty: from theta and scaling

  friend bool operator==(const RopeSpec&, const RopeSpec&) = default;
};

struct LayerSpec {
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t value_head_dim = 0;  // 0 means head_dim
  float scale = 0;                   // 0 means 1 / sqrt(head_dim)
  std::uint32_t sliding_window = 0;  // 0 means no window
  float logit_softcap = 0;           // 0 means no soft-cap
  std::vector<float> sinks;          // one per query head, or empty
  std::optional<RopeSpec> rope;      // nullopt: the model's

  friend bool operator==(const LayerSpec&, const LayerSpec&) = default;
};

struct ModelSpec {
  std::string name;
  kernels::ElementType type = kernels::ElementType::kBf16;
  std::vector<LayerSpec> layers;
  std::vector<std::uint32_t> delimiter_token_ids;
  double rope_theta = 0;
  bool rope_interleaved = false;
  std::string rope_scaling;
  double rope_scaling_factor = 0;
  std::vector<double> rope_frequencies;
  // Tell weights apart that share a name and a geometry. Empty: unknown.
  std::string weights_id;
  std::string adapter_id;

  // The RoPE of layers that have none of their own.
  RopeSpec rope() const {
    return {.theta = rope_theta,
            .interleaved = rope_interleaved,
            .scaling = rope_scaling,
            .scaling_factor = rope_scaling_factor,
            .frequencies = rope_frequencies};
  }
  RopeSpec RopeOf(std::uint32_t layer) const { return layers[layer].rope.value_or(rope()); }
  // Whether both are the same weights of the same model, as far as their names and ids tell.
  bool SameWeights(const ModelSpec& other) const {
    return name == other.name && weights_id == other.weights_id && adapter_id == other.adapter_id;
  }

  friend bool operator==(const ModelSpec&, const ModelSpec&) = default;
};

inline constexpr std::uint32_t kMaxLayers = 1024;
inline constexpr std::uint32_t kMaxHeads = 1024;
inline constexpr std::size_t kMaxNameBytes = 128;
inline constexpr std::size_t kMaxDelimiters = 65536;
inline constexpr std::size_t kMaxScalingBytes = 64;
inline constexpr std::size_t kMaxIdBytes = 64;  // of weights_id and adapter_id
inline constexpr std::uint64_t kMaxSpecBytes = 1 << 20;

// Both return INVALID_ARGUMENT with the value and the limit. They are separate so that a caller can
// check a message before it copies lists out of it.
absl::Status CheckLayerCount(std::uint64_t layers);
absl::Status CheckSpecBytes(std::uint64_t bytes);
// Heap memory of a spec.
std::uint64_t BytesOf(const ModelSpec& spec);

// Immutable. Shared by all sequences of the model; safe to read from any thread.
class Model {
 public:
  // Returns INVALID_ARGUMENT naming layer, value and limit, or UNIMPLEMENTED naming a feature that
  // the engine does not serve.
  static absl::StatusOr<Model> Create(ModelId id, ModelSpec spec, std::uint32_t ring_tiles);

  ModelId id() const { return id_; }
  const ModelSpec& spec() const { return spec_; }
  // Hash of every field of the spec except the name: 32 hexadecimal digits, equal on every node.
  const std::string& fingerprint() const { return fingerprint_; }
  // kernels::FingerprintOf, which book files name.
  std::uint64_t book_fingerprint() const { return book_fingerprint_; }
  const shm::LaneLayout& layout() const { return layout_; }
  std::uint32_t layers() const { return layout_.layers(); }
  std::uint32_t lanes() const { return layout_.lanes(); }
  // Points into this model, so it is valid only while the model lives.
  kernels::LayerGeometry geometry(std::uint32_t layer) const;
  // Heap memory, this object included.
  std::uint64_t bytes() const;

 private:
  Model(ModelId id, ModelSpec spec, shm::LaneLayout layout);

  ModelId id_;
  ModelSpec spec_;  // with defaults filled in
  std::string fingerprint_;
  std::uint64_t book_fingerprint_;
  shm::LaneLayout layout_;
};

}  // namespace tessera::cache
