// A model's geometry, checked once at registration, and what follows from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/ids.h"
#include "kernels/dispatch/attend.h"
#include "proto/shm/lane_layout.h"

namespace tessera::cache {

struct LayerSpec {
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t value_head_dim = 0;  // 0: head_dim
  float scale = 0;                   // 0: 1 / sqrt(head_dim)
  std::uint32_t sliding_window = 0;  // 0: none
  float logit_softcap = 0;           // 0: none
  std::vector<float> sinks;          // query_heads of them, or none

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
  std::vector<double> rope_frequencies;  // of each pair of channels; none: by theta and scaling

  friend bool operator==(const ModelSpec&, const ModelSpec&) = default;
};

inline constexpr std::uint32_t kMaxLayers = 1024;
inline constexpr std::uint32_t kMaxHeads = 1024;
inline constexpr std::size_t kMaxNameBytes = 128;
inline constexpr std::size_t kMaxDelimiters = 65536;

// Immutable; shared by the sequences of the model.
class Model {
 public:
  // INVALID_ARGUMENT names layer, value and limit; UNIMPLEMENTED names what the engine does not
  // serve.
  static absl::StatusOr<Model> Create(ModelId id, ModelSpec spec, std::uint32_t ring_tiles);

  ModelId id() const { return id_; }
  const ModelSpec& spec() const { return spec_; }
  // Of all that the spec says but the name: 32 hexadecimal digits, the same on every node.
  const std::string& fingerprint() const { return fingerprint_; }
  const shm::LaneLayout& layout() const { return layout_; }
  std::uint32_t layers() const { return layout_.layers(); }
  std::uint32_t lanes() const { return layout_.lanes(); }
  // Points into this model: valid while it lives.
  kernels::LayerGeometry geometry(std::uint32_t layer) const;

 private:
  Model(ModelId id, ModelSpec spec, shm::LaneLayout layout);

  ModelId id_;
  ModelSpec spec_;  // defaults filled in
  std::string fingerprint_;
  shm::LaneLayout layout_;
};

}  // namespace tessera::cache
