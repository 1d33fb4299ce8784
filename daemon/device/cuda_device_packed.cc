// Encodes and gathers tiles on a CUDA device, and decides which selections it supports.

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/device/cuda_call_context.h"
#include "daemon/device/cuda_device.h"

namespace tessera::device {

namespace cuda = kernels::cuda;

namespace {

std::uint64_t AddressOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// The jobs for tiles of one head_dim; a launch handles only one.
class EncodeLaunch {
 public:
  EncodeLaunch(std::uint32_t head_dim, std::span<const TileStrategy> strategies,
               kernels::ElementType type, std::span<const TileEncode> tiles)
      : places_(strategies.size(), kElsewhere), type_(type) {
    for (std::size_t i = 0; i < strategies.size(); ++i) {
      if (strategies[i].shape.head_dim == head_dim) AddStrategy(i, strategies[i]);
    }
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      if (places_[tiles[i].strategy] != kElsewhere) AddTile(i, tiles[i]);
    }
  }

  // Sets `unfit` to the first tile that cannot be stored, as an index into the caller's tiles.
  cuda::Error Run(cuda::TileCalls& calls, std::optional<std::size_t>* unfit) const {
    std::optional<std::uint32_t> unusable;
    cuda::Error error = calls.Encode(strategies_, type_, jobs_, &unusable);
    if (unusable.has_value()) *unfit = tiles_[*unusable];
    return error;
  }

 private:
  static constexpr std::uint32_t kElsewhere = ~std::uint32_t{0};

  void AddStrategy(std::size_t index, const TileStrategy& strategy) {
    places_[index] = static_cast<std::uint32_t>(strategies_.size());
    strategies_.push_back({.shape = strategy.shape,
                           .layout = kernels::LayoutOf(strategy.shape),
                           .rotation_type = strategy.rotation.type,
                           .key_rotation = AddressOf(strategy.rotation.key),
                           .value_rotation = AddressOf(strategy.rotation.value),
                           .key_mean = AddressOf(strategy.rotation.key_mean),
                           .value_mean = AddressOf(strategy.rotation.value_mean),
                           .key_error_limit = strategy.limits.key,
                           .value_error_limit = strategy.limits.value});
  }
  void AddTile(std::size_t index, const TileEncode& tile) {
    const std::uint32_t strategy = places_[tile.strategy];
    const std::uint32_t head_dim = strategies_[strategy].shape.head_dim;
    jobs_.push_back({.key = AddressOf(tile.key),
                     .value = AddressOf(tile.value),
                     .stride = head_dim * kernels::ElementBytes(type_),
                     .weights = AddressOf(tile.weights),
                     .positions = AddressOf(tile.positions),
                     .tile = AddressOf(tile.to.tile),
                     .summaries = AddressOf(tile.to.summaries),
                     .rows = tile.rows,
                     .strategy = strategy});
    tiles_.push_back(index);
    const std::string_view problem = cuda::EncodeProblem(strategies_, type_, jobs_.back());
    TESSERA_CHECK(problem.empty(), problem);
  }

  std::vector<std::uint32_t> places_;  // index in strategies_ of each of the caller's strategies
  std::vector<cuda::DeviceStrategy> strategies_;
  std::vector<cuda::EncodeTileJob> jobs_;
  std::vector<std::size_t> tiles_;  // index in the caller's tiles of each job
  kernels::ElementType type_;
};

bool SameRule(const kernels::SelectionRule* a, const kernels::SelectionRule* b) {
  if (a == b) return true;
  if (a == nullptr || b == nullptr) return false;
  return *a == *b;
}

}  // namespace

absl::StatusOr<std::optional<std::size_t>> CudaDevice::Encode(
    std::span<const TileStrategy> strategies, kernels::ElementType type,
    std::span<const TileEncode> tiles) {
  for (const TileEncode& tile : tiles) {
    TESSERA_CHECK(tile.strategy < strategies.size() &&
                      kernels::IsHeadDim(strategies[tile.strategy].shape.head_dim),
                  "a tile's strategy must exist and have a supported head_dim");
  }
  absl::StatusOr<Taken> bench = AcquireBench();
  if (!bench.ok()) return bench.status();
  std::optional<std::size_t> first;
  for (const std::uint32_t head_dim : kernels::kHeadDims) {
    std::optional<std::size_t> unfit;
    const EncodeLaunch launch(head_dim, strategies, type, tiles);
    if (absl::Status status = Answer(launch.Run((**bench).tiles(), &unfit)); !status.ok()) {
      return status;
    }
    if (unfit.has_value()) first = std::min(first.value_or(*unfit), *unfit);
  }
  return first;
}

absl::Status CudaDevice::Gather(const kernels::TileShape& from, const kernels::TileShape& to,
                                std::span<const TileGather> tiles) {
  std::vector<cuda::DeviceStrategy> strategies;
  for (const kernels::TileShape& shape : {from, to}) {
    strategies.push_back({.shape = shape, .layout = kernels::LayoutOf(shape)});
  }
  std::vector<cuda::GatherTile> jobs;
  for (const TileGather& tile : tiles) {
    jobs.push_back({.tile = AddressOf(tile.to.tile),
                    .summaries = AddressOf(tile.to.summaries),
                    .rows = tile.rows,
                    .from = 0,
                    .to = 1});
    const std::string_view problem = cuda::GatherProblem(strategies, jobs.back());
    TESSERA_CHECK(problem.empty(), problem);
  }
  absl::StatusOr<Taken> bench = AcquireBench();
  if (!bench.ok()) return bench.status();
  return Answer((**bench).tiles().Gather(strategies, jobs));
}

// A step image has only one rule per sequence.
absl::Status CudaDevice::CheckServed(const kernels::AttendBatch& batch) const {
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    TESSERA_CHECK(batch.geometry.group() == 1 || batch.items[i].selection == nullptr ||
                      !batch.items[i].selection->each_head,
                  "a selection per query head needs one kv head per query head");
    if (batch.items[i].selection != nullptr && batch.items[i].selection->each_query) {
      return absl::UnimplementedError(Concat(
          "device ", description_.name,
          " makes one choice for all queries of a sequence; leave out each_query, or use the "
          "CPU device for such rules"));
    }
    const std::size_t first = i - i % batch.geometry.kv_heads;
    if (SameRule(batch.items[i].selection, batch.items[first].selection)) continue;
    return absl::UnimplementedError(
        Concat("device ", description_.name,
               " needs the same selection rule for all kv heads of a sequence, but", " items ",
               first, " and ", i, " differ; use the CPU device for such rules"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::device
