// A model's geometry as the worker states it, and as a session knows it once registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "kernels/format/element.h"
#include "kernels/format/layer_geometry.h"
#include "proto/shm/lane_layout.h"
#include "tessera/v1/common.pb.h"

namespace tessera::client {

using kernels::ElementType;

struct LayerGeometry {
  std::uint32_t query_heads = 0;  // a multiple of kv_heads
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;        // 64, 128 or 256
  std::uint32_t value_head_dim = 0;  // 0: head_dim; the daemon refuses any other
  float scale = 0;                   // 0: 1 / sqrt(head_dim)
  std::uint32_t sliding_window = 0;  // 0: none
  float logit_softcap = 0;           // 0: none
  std::vector<float> sinks;          // one per query head, or none
};

struct Rope {
  double theta = 0;  // 0: no rotary positions
  bool interleaved = false;
  std::string scaling;
  double scaling_factor = 0;
  // Radians per position of each pair of channels, as the model has them ("inv_freq"); none: by
  // theta, and linear scaling.
  std::vector<double> frequencies;
};

struct ModelGeometry {
  std::string name;                       // 1 to 128 characters
  ElementType type = ElementType::kBf16;  // of K, V and Q
  std::vector<LayerGeometry> layers;
  Rope rope;
  std::vector<std::uint32_t> delimiter_token_ids;
};

v1::ModelGeometry ToProto(const ModelGeometry& geometry);
v1::DType ToDType(ElementType type);

// A registered model in one session. Immutable: the next session may give it another id and
// another ring.
class BoundModel {
 public:
  // INVALID_ARGUMENT where a lane layout cannot be made of it. What else the daemon refuses it
  // says itself.
  static absl::Status Check(const ModelGeometry& geometry);
  BoundModel(ModelId id, const ModelGeometry& geometry, std::uint32_t ring_tiles);
  BoundModel(const BoundModel&) = delete;  // geometries point into it
  BoundModel& operator=(const BoundModel&) = delete;

  ModelId id() const { return id_; }
  ElementType type() const { return type_; }
  std::uint32_t layers() const { return layout_.layers(); }
  const shm::LaneLayout& layout() const { return layout_; }
  // Points into this model.
  const kernels::LayerGeometry& geometry(std::uint32_t layer) const { return geometry_[layer]; }
  std::size_t row_bytes(std::uint32_t layer) const {
    return geometry_[layer].head_dim * kernels::ElementBytes(type_);
  }
  // Of K or V of one token of one layer.
  std::size_t token_bytes(std::uint32_t layer) const {
    return geometry_[layer].kv_heads * row_bytes(layer);
  }

 private:
  const ModelId id_;
  const ElementType type_;
  const shm::LaneLayout layout_;
  const std::vector<std::vector<float>> sinks_;
  std::vector<kernels::LayerGeometry> geometry_;
};

// What the worker holds: the geometry, and its present binding. Registered anew, unseen, when the
// worker attaches again.
struct ModelRecord {
  explicit ModelRecord(ModelGeometry stated) : geometry(std::move(stated)) {}

  std::shared_ptr<const BoundModel> bound() const {
    MutexLock lock(mutex);
    return current;
  }

  const ModelGeometry geometry;
  mutable Mutex mutex;
  std::shared_ptr<const BoundModel> current TESSERA_GUARDED_BY(mutex);
};

// A copyable handle of a registered model.
class Model {
 public:
  Model() = default;
  bool valid() const { return record_ != nullptr; }
  const ModelGeometry& geometry() const { return record_->geometry; }
  ModelId id() const { return record_->bound()->id(); }

 private:
  friend class Worker;
  explicit Model(std::shared_ptr<ModelRecord> record) : record_(std::move(record)) {}
  std::shared_ptr<ModelRecord> record_;
};

}  // namespace tessera::client
