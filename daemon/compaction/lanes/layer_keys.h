// Loads the keys of a layer's lanes into device memory, where token policies have them scored.
// Keys are scored as stored, or with their rotary rotation undone.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/compaction/lanes/rope_shift.h"
#include "daemon/device/device.h"
#include "daemon/policies/key_scorer.h"
#include "kernels/format/dense_tile.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::compaction {

// Owned by the decision about one layer. A lane is loaded when it is first scored, and stays loaded
// until another lane needs its memory. RESOURCE_EXHAUSTED: not even one lane fits.
class LayerKeys final : public policies::KeyScorer {
 public:
  struct Options {
    device::Device* device;  // outlives this object
    kernels::LayerGeometry geometry;
    // Limit of the loaded keys, in bytes as stored; one lane may exceed it. Loaded keys are not
    // charged to an account.
    std::uint64_t most_bytes = std::uint64_t{256} << 20;
    // Undoes the rotary rotation of each key, in fp32. Such keys pass through the host when they
    // are loaded. AddChannelSquares uses the stored keys all the same.
    std::optional<RopeShift> turner = std::nullopt;
  };
  // `runs`: one per kv head, from Sequence::LookAt. Keys of all their entries are scored, settled
  // segments first. Packed rows are read from their raw copies if those still exist, and decoded
  // otherwise. The runs are held by this object; appends to their segments may continue.
  LayerKeys(const Options& options, std::vector<cache::OpenRun> runs)
      : options_(options), runs_(std::move(runs)), lanes_(runs_.size()) {}

  absl::Status Look(std::uint32_t kv_head, std::span<const kernels::KeyObservation> looks) override;
  absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) override;
  absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                 std::span<double> sums) override;
  std::uint32_t observations_per_call() const override {
    return options_.device->description().observations_per_call;
  }

 private:
  kernels::DenseTile Tile() const {
    return {.head_dim = options_.geometry.head_dim, .type = options_.geometry.type};
  }
  static std::uint64_t EntriesOf(const cache::OpenRun& run) {
    return run.settled_entries() + run.provisional_entries() + run.plain_entries();
  }
  std::uint64_t BytesOf(std::size_t lane) const;
  // The same keys with their rotation undone, in fp32.
  absl::StatusOr<std::unique_ptr<device::LaneKeys>> UnrotatedKeys(const cache::OpenRun& run,
                                                                  device::LaneKeys& keys) const;
  absl::StatusOr<std::unique_ptr<device::LaneKeys>> AsStored(std::size_t lane) const;
  absl::Status Load(std::size_t lane);
  // Loads the lane if it is not loaded, unloading others for lack of memory.
  absl::Status Need(std::size_t lane);
  void UnloadAll();

  const Options options_;
  const std::vector<cache::OpenRun> runs_;
  std::vector<std::unique_ptr<device::LaneKeys>> lanes_;
  std::uint64_t loaded_bytes_ = 0;
};

}  // namespace tessera::compaction
