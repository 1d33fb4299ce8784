// Keys of a lane in the daemon's own memory.

#include <algorithm>
#include <cstring>
#include <new>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/device/cpu_device.h"
#include "kernels/format/dense_tile.h"
#include "kernels/tokens/channels.h"
#include "kernels/tokens/rows.h"

namespace tessera::device {

namespace {

using kernels::kTileEntries;

void Narrow(const float* from, std::uint32_t count, kernels::ElementType type, std::byte* to) {
  if (type == kernels::ElementType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint16_t bits = type == kernels::ElementType::kBf16 ? kernels::FloatToBf16(from[i])
                                                                   : kernels::FloatToFp16(from[i]);
    std::memcpy(to + i * sizeof bits, &bits, sizeof bits);
  }
}

// The keys of packed tiles, one after another.
class PackedKeys {
 public:
  PackedKeys(const kernels::Operations& operations, const TileStrategy& strategy,
             kernels::ElementType type)
      : operations_(operations),
        strategy_(strategy),
        layout_(kernels::LayoutOf(strategy.shape)),
        type_(type) {}

  void Read(const std::byte* tile, std::uint32_t rows, std::byte* to) {
    const kernels::TileShape& shape = strategy_.shape;
    const std::uint32_t padded = kernels::PaddedChannels(shape);
    operations_.decode({.tile = tile,
                        .shape = shape,
                        .layout = layout_,
                        .rows = rows,
                        .padded_channels = padded,
                        .keys = keys_,
                        .values = values_});
    operations_.unrotate({.rotation = strategy_.rotation.key,
                          .rotation_type = strategy_.rotation.type,
                          .channels = shape.key.channels,
                          .head_dim = shape.head_dim,
                          .rows = keys_,
                          .padded_channels = padded,
                          .row_count = rows,
                          .output = turned_,
                          .mean = strategy_.rotation.key_mean});
    Narrow(turned_, rows * shape.head_dim, type_, to);
  }

 private:
  static constexpr std::size_t kMostFloats =
      kTileEntries * kernels::kHeadDims[std::size(kernels::kHeadDims) - 1];

  const kernels::Operations& operations_;
  const TileStrategy& strategy_;
  const kernels::TileLayout layout_;
  const kernels::ElementType type_;
  alignas(64) float keys_[kMostFloats];
  alignas(64) float values_[kMostFloats];
  alignas(64) float turned_[kMostFloats];
};

// Copies the rows of one run to `to`.
void CopyRun(const kernels::Operations& operations, const KeyRun& run, kernels::DenseTile dense,
             std::byte* to) {
  if (run.rows != nullptr) {
    std::memcpy(to, run.rows, run.entries * dense.row_bytes());
    return;
  }
  const auto for_each_tile = [&](const auto& copy) {
    for (std::uint64_t entry = 0; entry < run.entries; entry += kTileEntries) {
      const std::uint64_t rows = std::min<std::uint64_t>(kTileEntries, run.entries - entry);
      copy(run.tiles[entry / kTileEntries], static_cast<std::uint32_t>(rows),
           to + entry * dense.row_bytes());
    }
  };
  if (!run.strategy.shape.packed()) {
    for_each_tile([&](const std::byte* tile, std::uint32_t rows, std::byte* target) {
      std::memcpy(target, tile + dense.key_offset(0), rows * dense.row_bytes());
    });
    return;
  }
  const auto packed = std::make_unique<PackedKeys>(operations, run.strategy, dense.type);
  for_each_tile([&](const std::byte* tile, std::uint32_t rows, std::byte* target) {
    packed->Read(tile, rows, target);
  });
}

class HostKeys final : public LaneKeys {
 public:
  HostKeys(const kernels::Operations& operations, const kernels::LayerGeometry& geometry,
           std::unique_ptr<std::byte[]> rows, std::uint64_t count)
      : geometry_(geometry),
        rows_(std::move(rows)),
        keys_{.rows = rows_.get(), .count = count},
        sums_(operations, geometry_) {}

  absl::Status Look(std::span<const kernels::KeyObservation> looks) override {
    for (const kernels::KeyObservation& look : looks) {
      const std::string_view problem = kernels::ObservationProblem(look, keys_.count);
      TESSERA_CHECK(problem.empty(), problem);
      sums_.Add(keys_, look);
    }
    return absl::OkStatus();
  }
  absl::Status AddSquaredLengths(std::span<double> sums) override {
    TESSERA_CHECK(sums.size() <= keys_.count, "lengths requested of more keys than there are");
    const std::size_t row_bytes = geometry_.head_dim * kernels::ElementBytes(geometry_.type);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] +=
          kernels::SquaredLength(keys_.rows + i * row_bytes, geometry_.head_dim, geometry_.type);
    }
    return absl::OkStatus();
  }
  absl::Status AddChannelSquares(std::uint64_t count, std::span<double> sums) override {
    TESSERA_CHECK(count <= keys_.count, "channels requested of more keys than there are");
    kernels::AddChannelSquares(keys_.rows, count, geometry_.head_dim, geometry_.type, sums);
    return absl::OkStatus();
  }
  absl::Status Read(std::byte* to) override {
    const std::size_t row_bytes = geometry_.head_dim * kernels::ElementBytes(geometry_.type);
    if (keys_.count > 0) std::memcpy(to, keys_.rows, keys_.count * row_bytes);
    return absl::OkStatus();
  }

 private:
  const kernels::LayerGeometry geometry_;
  const std::unique_ptr<std::byte[]> rows_;
  const kernels::RowRange keys_;
  kernels::AttentionSums sums_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LaneKeys>> CpuDevice::LoadKeys(
    const kernels::LayerGeometry& geometry, std::span<const KeyRun> runs) {
  const kernels::Operations& operations = kernels::OperationsOf(kernels_);
  const kernels::DenseTile dense = {.head_dim = geometry.head_dim, .type = geometry.type};
  std::uint64_t count = 0;
  for (const KeyRun& run : runs) count += run.entries;
  const std::uint64_t bytes = count * dense.row_bytes();
  std::unique_ptr<std::byte[]> rows(new (std::nothrow) std::byte[bytes]);
  if (rows == nullptr) {
    return absl::ResourceExhaustedError(
        Concat("the keys of a lane take ", bytes,
               " bytes, but the machine is out of memory; retry after other requests have ended"));
  }
  std::byte* to = rows.get();
  for (const KeyRun& run : runs) {
    CopyRun(operations, run, dense, to);
    to += run.entries * dense.row_bytes();
  }
  return std::make_unique<HostKeys>(operations, geometry, std::move(rows), count);
}

}  // namespace tessera::device
