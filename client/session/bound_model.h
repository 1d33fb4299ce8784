// A model as registered in one session, and the record behind every handle of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "kernels/format/element.h"
#include "kernels/format/layer_geometry.h"
#include "proto/shm/lane_layout.h"
#include "tessera/model.h"
#include "tessera/v1/common.pb.h"

namespace tessera::client {

v1::ModelGeometry ToProto(const ModelGeometry& geometry);
v1::DType ToDType(kernels::ElementType type);

// A registered model in one session. Immutable: the next session may assign another id and another
// ring size.
class BoundModel {
 public:
  // INVALID_ARGUMENT if the geometry has no valid lane layout. The daemon checks the rest.
  static absl::Status Check(const ModelGeometry& geometry);
  BoundModel(ModelId id, const ModelGeometry& geometry, std::uint32_t ring_tiles);
  BoundModel(const BoundModel&) = delete;  // geometries point into it
  BoundModel& operator=(const BoundModel&) = delete;

  ModelId id() const { return id_; }
  kernels::ElementType type() const { return type_; }
  std::uint32_t layers() const { return layout_.layers(); }
  const shm::LaneLayout& layout() const { return layout_; }
  // Points into this model.
  const kernels::LayerGeometry& geometry(std::uint32_t layer) const { return geometry_[layer]; }
  std::size_t row_bytes(std::uint32_t layer) const {
    return geometry_[layer].head_dim * kernels::ElementBytes(type_);
  }
  // Bytes of K or of V of one token of one layer.
  std::size_t token_bytes(std::uint32_t layer) const {
    return geometry_[layer].kv_heads * row_bytes(layer);
  }

 private:
  const ModelId id_;
  const kernels::ElementType type_;
  const shm::LaneLayout layout_;
  const std::vector<std::vector<float>> sinks_;
  std::vector<kernels::LayerGeometry> geometry_;
};

// A model's geometry and its current binding. Core registers it again when the worker reattaches.
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

}  // namespace tessera::client
