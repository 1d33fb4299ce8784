// The keys of a layer's lanes as token policies look at them: loaded where the device computes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/recode.h"
#include "daemon/device/device.h"
#include "daemon/policies/key_scorer.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::compaction {

class LayerKeys final : public policies::KeyScorer {
 public:
  struct Options {
    device::Device* device;  // outlives it
    kernels::LayerGeometry geometry;
  };
  // Of everything in these runs, by kv head: settled segments first, packed rows as what was kept
  // of them, or as they came where raw copies are still there. The runs are ones that were looked
  // at (Sequence::LookAt): others may go on appending to their segments.
  //
  // Where the device has no room for all lanes together, they take turns: the runs are then held
  // as long as this is, and each lane is loaded when it is asked for. RESOURCE_EXHAUSTED where
  // there is no room for one.
  static absl::StatusOr<std::unique_ptr<LayerKeys>> Of(const Options& options,
                                                       std::vector<cache::OpenRun> runs);

  absl::Status Look(std::uint32_t kv_head, std::span<const kernels::KeyLook> looks) override;
  absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) override;
  absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                 std::span<double> sums) override;
  std::uint32_t looks_at_once() const override {
    return options_.device->description().looks_at_once;
  }

 private:
  LayerKeys(const Options& options, std::vector<cache::OpenRun> runs)
      : options_(options), runs_(std::move(runs)), lanes_(runs_.size()) {}
  absl::Status Load(std::size_t lane);
  // Makes sure that it is there, in place of another where they take turns.
  absl::Status Need(std::size_t lane);

  const Options options_;
  std::vector<cache::OpenRun> runs_;  // empty once all lanes are loaded
  std::vector<std::unique_ptr<device::LaneKeys>> lanes_;
};

}  // namespace tessera::compaction
