// The keys of a layer's lanes as token policies look at them: loaded where the device computes, as
// they are stored, or as they were before they were turned to their positions.
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

class LayerKeys final : public policies::KeyScorer {
 public:
  struct Options {
    device::Device* device;  // outlives it
    kernels::LayerGeometry geometry;
    // So many bytes of keys stay loaded, as they are stored, or one lane's. What is loaded is in no
    // account.
    std::uint64_t most_bytes = std::uint64_t{256} << 20;
    // Keys are turned back by it, each from its entry's position, and kept in fp32: for that they
    // pass through the host whenever they are loaded. Channels are those of stored keys all the
    // same.
    std::optional<KeyTurner> turner = std::nullopt;
  };
  // Of everything in these runs, by kv head: settled segments first, packed rows as what was kept
  // of them, or as they came where raw copies are still there. The runs are ones that were looked
  // at (Sequence::LookAt), and are held as long as this is: others may go on appending to their
  // segments.
  //
  // A lane is loaded when it is asked for, and stays until there is no room for another.
  // RESOURCE_EXHAUSTED where there is no room for one alone.
  LayerKeys(const Options& options, std::vector<cache::OpenRun> runs)
      : options_(options), runs_(std::move(runs)), lanes_(runs_.size()) {}

  absl::Status Look(std::uint32_t kv_head, std::span<const kernels::KeyLook> looks) override;
  absl::Status AddSquaredLengths(std::uint32_t kv_head, std::span<double> sums) override;
  absl::Status AddChannelSquares(std::uint32_t kv_head, std::uint64_t count,
                                 std::span<double> sums) override;
  std::uint32_t looks_at_once() const override {
    return options_.device->description().looks_at_once;
  }

 private:
  kernels::DenseTile Tile() const {
    return {.head_dim = options_.geometry.head_dim, .type = options_.geometry.type};
  }
  static std::uint64_t EntriesOf(const cache::OpenRun& run) {
    return run.settled_entries() + run.provisional_entries() + run.plain_entries();
  }
  std::uint64_t BytesOf(std::size_t lane) const;
  // The same keys, turned back.
  absl::StatusOr<std::unique_ptr<device::LaneKeys>> TurnedBack(const cache::OpenRun& run,
                                                               device::LaneKeys& keys) const;
  absl::StatusOr<std::unique_ptr<device::LaneKeys>> AsStored(std::size_t lane) const;
  absl::Status Load(std::size_t lane);
  // Makes sure that it is there.
  absl::Status Need(std::size_t lane);
  void UnloadAll();

  const Options options_;
  const std::vector<cache::OpenRun> runs_;
  std::vector<std::unique_ptr<device::LaneKeys>> lanes_;
  std::uint64_t loaded_bytes_ = 0;
};

}  // namespace tessera::compaction
