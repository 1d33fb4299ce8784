#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "client/bench/gpu/gpu.h"
#include "client/gpu/gpu.h"
#include "daemon/base/strings.h"
#include "kernels/cuda/host/tile_ops.h"

namespace tessera::cli::bench {

namespace cuda = kernels::cuda;
using client::GpuStatus;

namespace {

constexpr std::uint32_t kObservers = 32;  // queries
constexpr std::uint32_t kMomentsRows = 4096;

class TilesBench {
 public:
  TilesBench(const GpuTilesBench& bench, Report& report)
      : bench_(bench),
        report_(report),
        calls_(bench.runtime, bench.queue),
        tiles_(bench.runtime),
        keys_(bench.runtime),
        sums_(bench.runtime) {}

  absl::Status Run() {
    const LaneSetShape& shape = bench_.packed.host().shape();
    tile_ = shape.tile;
    layout_ = kernels::LayoutOf(tile_);
    count_ = shape.lanes * (shape.tokens / kernels::kTileEntries);
    dim_ = tile_.head_dim;
    row_bytes_ = dim_ * sizeof(std::uint16_t);
    const cuda::SegmentSpec& segment = bench_.packed.segments(0).front();
    strategy_ = {.shape = tile_,
                 .layout = layout_,
                 .rotation_type = kernels::ElementType::kBf16,
                 .key_rotation = Address(bench_.packed.data()) + segment.key_rotation,
                 .value_rotation = Address(bench_.packed.data()) + segment.value_rotation};
    absl::Status status = Encode();
    if (status.ok()) status = Keys();
    if (status.ok()) status = Observe();
    if (status.ok()) status = Moments();
    return status;
  }

 private:
  static std::uint64_t Address(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
  }

  // Adds a row for `act`; its first call is not counted.
  template <class Act>
  absl::Status Measure(const char* name, double bytes, const Act& act) {
    std::vector<double> seconds;
    for (std::uint32_t round = 0; round <= bench_.rounds; ++round) {
      Progress(Concat(name, ": round ", round, " of ", bench_.rounds));
      const auto begun = std::chrono::steady_clock::now();
      if (absl::Status status = act(); !status.ok()) return status;
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun;
      if (round > 0) seconds.push_back(taken.count());
    }
    const double rate = bytes * 1e-9 / Median(seconds);
    report_.Add({.name = name,
                 .value = rate,
                 .unit = "GB/s",
                 .baseline = "copy",
                 .ratio = rate / bench_.copy_rate});
    return absl::OkStatus();
  }

  // Encodes dense rows into packed tiles with summaries. Rate: bytes of dense rows.
  absl::Status Encode() {
    const kernels::DenseTile from{dim_, kernels::ElementType::kBf16};
    const std::uint64_t summaries_at = count_ * RoundedTile();
    absl::Status status =
        GpuStatus(tiles_.Grow(summaries_at + count_ * std::uint64_t{layout_.summary_bytes}));
    if (!status.ok()) return status;
    std::vector<cuda::EncodeTileJob> jobs;
    for (std::uint64_t i = 0; i < count_; ++i) {
      const std::uint64_t dense =
          Address(bench_.dense.data()) + i * bench_.dense.host().tile_bytes();
      jobs.push_back({.key = dense,
                      .value = dense + from.value_offset(0),
                      .stride = from.row_bytes(),
                      .tile = Address(tiles_.at(i * RoundedTile())),
                      .summaries = Address(tiles_.at(summaries_at + i * layout_.summary_bytes)),
                      .rows = kernels::kTileEntries});
    }
    const double bytes = 2.0 * static_cast<double>(row_bytes_) * kernels::kTileEntries * count_;
    return Measure("encode_packed25_e1", bytes, [&]() -> absl::Status {
      std::optional<std::uint32_t> unusable;
      absl::Status done =
          GpuStatus(calls_.Encode({&strategy_, 1}, kernels::ElementType::kBf16, jobs, &unusable));
      if (done.ok() && unusable.has_value()) {
        return absl::InternalError(Concat("encoding tile ", *unusable, " failed"));
      }
      return done;
    });
  }
  std::uint64_t RoundedTile() const { return bench_.packed.host().tile_bytes(); }

  // Decodes the keys of packed tiles. Rate: bytes of decoded rows.
  absl::Status Keys() {
    const std::uint64_t tile_keys = std::uint64_t{row_bytes_} * kernels::kTileEntries;
    if (absl::Status status = GpuStatus(keys_.Grow(count_ * tile_keys)); !status.ok())
      return status;
    std::vector<cuda::KeysTileJob> jobs;
    for (std::uint64_t i = 0; i < count_; ++i) {
      jobs.push_back({.tile = Address(tiles_.at(i * RoundedTile())),
                      .keys = Address(keys_.at(i * tile_keys)),
                      .rows = kernels::kTileEntries});
    }
    return Measure("keys_packed25_e1", static_cast<double>(count_ * tile_keys), [&] {
      return GpuStatus(calls_.Keys({&strategy_, 1}, kernels::ElementType::kBf16, jobs));
    });
  }

  // Attention mass of a prompt's last queries on all keys of each lane. Rate: bytes of keys.
  absl::Status Observe() {
    const LaneSetShape& shape = bench_.packed.host().shape();
    const std::uint64_t lane_keys = std::uint64_t{row_bytes_} * shape.tokens;
    std::vector<std::uint64_t> ends(kObservers, shape.tokens);
    const std::uint64_t ends_bytes = ends.size() * sizeof ends[0];
    const std::uint64_t sums_bytes = std::uint64_t{shape.tokens} * sizeof(double);
    absl::Status status = GpuStatus(sums_.Grow(ends_bytes + shape.lanes * sums_bytes));
    if (!status.ok()) return status;
    status = GpuStatus(bench_.queue.Copy(sums_.at(), ends.data(), ends_bytes));
    if (!status.ok()) return status;
    std::vector<cuda::ObserveTileJob> jobs;
    for (std::uint32_t lane = 0; lane < shape.lanes; ++lane) {
      jobs.push_back(
          {.keys = Address(keys_.at(lane * lane_keys)),
           .key_stride = row_bytes_,
           .key_count = shape.tokens,
           // The lane's newest keys serve as queries.
           .queries = Address(keys_.at((lane + 1) * lane_keys - kObservers * row_bytes_)),
           .query_stride = row_bytes_,
           .visible_end = Address(sums_.at()),
           .sums = Address(sums_.at(ends_bytes + lane * sums_bytes)),
           .query_count = kObservers});
    }
    const cuda::ObserveForm form = {.head_dim = dim_,
                                    .type = kernels::ElementType::kBf16,
                                    .scale = 1 / std::sqrt(static_cast<float>(dim_)),
                                    .logit_softcap = 0,
                                    .logits = false};
    return Measure("observe_32_queries", static_cast<double>(shape.lanes * lane_keys),
                   [&] { return GpuStatus(calls_.Observe(form, jobs)); });
  }

  // Second moments of each lane's first rows, the input of strategies. Rate: bytes of rows.
  absl::Status Moments() {
    const LaneSetShape& shape = bench_.packed.host().shape();
    const std::uint32_t rows = std::min(kMomentsRows, shape.tokens);
    const std::uint64_t lane_keys = std::uint64_t{row_bytes_} * shape.tokens;
    const std::uint64_t sums_bytes = std::uint64_t{dim_} * dim_ * sizeof(double);
    absl::Status status = GpuStatus(sums_.Grow(shape.lanes * sums_bytes));
    if (!status.ok()) return status;
    std::vector<cuda::MomentsTileJob> jobs;
    for (std::uint32_t lane = 0; lane < shape.lanes; ++lane) {
      jobs.push_back({.rows = Address(keys_.at(lane * lane_keys)),
                      .stride = row_bytes_,
                      .sums = Address(sums_.at(lane * sums_bytes)),
                      .row_count = rows});
    }
    return Measure(
        "moments_4096_rows", static_cast<double>(std::uint64_t{rows} * row_bytes_ * shape.lanes),
        [&] { return GpuStatus(calls_.Moments(dim_, kernels::ElementType::kBf16, jobs)); });
  }

  const GpuTilesBench& bench_;
  Report& report_;
  cuda::TileCalls calls_;
  cuda::Scratch tiles_;
  cuda::Scratch keys_;
  cuda::Scratch sums_;
  kernels::TileShape tile_;
  kernels::TileLayout layout_;
  cuda::DeviceStrategy strategy_;
  std::uint64_t count_ = 0;  // tiles
  std::uint32_t dim_ = 0;
  std::uint64_t row_bytes_ = 0;
};

}  // namespace

absl::Status AddTileRows(const GpuTilesBench& bench, Report& report) {
  return TilesBench(bench, report).Run();
}

}  // namespace tessera::cli::bench
