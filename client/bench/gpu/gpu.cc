// tessera bench gpu: the GPU kernels, compared with a device copy of the bytes they read and with
// dense attention over the same tokens.
//
// A layer's attention is recorded as a graph and replayed, as an engine does it, which excludes
// host time. Each round replays all variants one after another. A value is the median over rounds,
// a ratio the median of the ratios within a round. The data read exceeds the GPU's caches by far: a
// batch of many sequences, or as many sequences one after another.
#include "client/bench/gpu/gpu.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/bench/gpu/gpu_lanes.h"
#include "client/step/thread_team.h"
#include "client/gpu/gpu.h"
#include "daemon/base/strings.h"

namespace tessera::cli::bench {

namespace cuda = kernels::cuda;
using client::GpuStatus;

namespace {

// Allowed difference from the CPU's outputs, relative to their root mean square: the GPU rounds
// rotated queries and weights to bf16.
constexpr double kMostError = 0.05;

struct Variant {
  const char* name;
  kernels::TileShape tile;
  double rate = 1;            // below 1: blocks are selected
  bool against_copy = false;  // adds a row that compares its bandwidth with a copy's
};

// The first variant is the baseline.
std::vector<Variant> Variants(std::uint32_t head_dim) {
  using kernels::TileFormat;
  const kernels::TileShape dense = kernels::DenseShape(head_dim, kernels::ElementType::kBf16);
  kernels::TileShape quest = dense;
  quest.summary = kernels::Summary::kMinMax;
  quest.block = 16;
  const kernels::TileShape packed = PackedTile(head_dim, TileFormat::kPackedBf16, 1);
  const kernels::TileShape coarse = PackedTile(head_dim, TileFormat::kPackedBf16, 1, 16);
  return {{"dense", dense, 1, true},
          {"packed25_e1", packed, 1, true},
          {"packed25_e2", PackedTile(head_dim, TileFormat::kPackedBf16, 2), 1, true},
          {"packed25_e4", PackedTile(head_dim, TileFormat::kPackedBf16, 4), 1, true},
          {"int8_e1", PackedTile(head_dim, TileFormat::kPackedInt8, 1), 1, true},
          {"int8_e2", PackedTile(head_dim, TileFormat::kPackedInt8, 2), 1, true},
          {"quest625", quest, 0.0625},
          {"select625", coarse, 0.0625, true},
          {"select125", coarse, 0.125}};
}

// Bytes that one attention call of the variant reads, over all lanes of a batch.
double BytesRead(const Variant& variant, const LaneSet& set, std::uint32_t lanes) {
  const kernels::TileLayout layout = kernels::LayoutOf(variant.tile);
  const double tiles = static_cast<double>(set.shape().tokens / kernels::kTileEntries);
  const double rows = static_cast<double>(layout.bytes) * variant.rate;
  const double summaries = variant.rate < 1 ? static_cast<double>(layout.summary_bytes) : 0;
  double rotations = 0;
  if (variant.tile.packed()) {
    rotations =
        static_cast<double>(set.lane(0).segment_count *
                            kernels::RotationBytes(variant.tile, kernels::ElementType::kBf16));
  }
  return lanes * (tiles * (rows + summaries) + rotations);
}

// Work that is recorded and replayed, and its times.
struct Replayed {
  std::string name;
  std::function<cuda::Error()> work;
  double bytes = 0;                  // read by one attention call
  std::uint32_t layers = 1;          // attention calls in `work`
  std::vector<double> seconds = {};  // per call, by round
};

class GpuBench {
 public:
  GpuBench(cuda::Runtime& runtime, const GpuBenchSize& size, Report& report)
      : runtime_(runtime), size_(size), report_(report), team_(size.threads) {}

  absl::Status Run() {
    if (absl::Status status = GpuStatus(runtime_.NewQueue(&queue_)); !status.ok()) return status;
    for (const std::uint32_t context : size_.contexts) {
      if (absl::Status status = MeasureContext(context); !status.ok()) return status;
    }
    return absl::OkStatus();
  }
  double worst_error() const { return worst_error_; }

 private:
  // Replays every item once per round.
  absl::Status Replay(std::vector<Replayed>& all, std::string_view what) {
    for (std::uint32_t round = 0; round < size_.rounds; ++round) {
      Progress(Concat(what, ": round ", round + 1, " of ", size_.rounds));
      for (Replayed& one : all) {
        double seconds = 0;
        absl::Status status = GpuStatus(queue_->Replay(one.work, size_.replays, &seconds));
        if (!status.ok()) return status;
        one.seconds.push_back(seconds / size_.replays / one.layers);
      }
    }
    return absl::OkStatus();
  }

  absl::Status MeasureContext(std::uint32_t context) {
    const std::uint64_t sequence_bytes =
        std::uint64_t{context} * size_.head_dim * 4 * size_.kv_heads;
    const auto sequences = static_cast<std::uint32_t>(
        std::max<std::uint64_t>(1, size_.least_dense_bytes / sequence_bytes));
    std::vector<std::unique_ptr<LaneSet>> sets;
    std::vector<std::unique_ptr<GpuLanes>> lanes;  // by set
    std::vector<std::size_t> set_of;
    const std::vector<Variant> variants = Variants(size_.head_dim);
    for (const Variant& variant : variants) {
      std::size_t same = 0;
      while (same < sets.size() && !(sets[same]->shape().tile == variant.tile)) ++same;
      set_of.push_back(same);
      if (same < sets.size()) continue;
      Progress(Concat("ctx", context, ": filling ", sequences, " sequences, ", variant.name));
      absl::StatusOr<std::unique_ptr<LaneSet>> set =
          sets.empty() ? LaneSet::Random({sequences * size_.kv_heads, context, variant.tile}, team_)
                       : LaneSet::Encoded(*sets.front(), variant.tile, team_);
      if (!set.ok()) return set.status();
      absl::StatusOr<std::unique_ptr<GpuLanes>> there = GpuLanes::Upload(runtime_, *queue_, **set);
      if (!there.ok()) return there.status();
      sets.push_back(*std::move(set));
      lanes.push_back(*std::move(there));
    }
    const auto of = [&](std::size_t variant) -> const GpuLanes& { return *lanes[set_of[variant]]; };
    absl::Status status = AddCopy(*lanes.front());
    for (const std::uint32_t group : size_.groups) {
      // All sequences as one batch, then each sequence alone.
      if (sequences > 1 && status.ok()) {
        status = MeasureBatches(variants, of, context, group, sequences, sequences);
      }
      if (status.ok()) status = MeasureBatches(variants, of, context, group, 1, sequences);
    }
    if (!status.ok() || context != size_.contexts.back()) return status;
    // variants[1] is the packed variant.
    return AddTileRows({.runtime = runtime_,
                        .queue = *queue_,
                        .dense = of(0),
                        .packed = of(1),
                        .rounds = size_.rounds,
                        .copy_rate = copy_rate_},
                       report_);
  }

  // Adds the first row: bandwidth of a device copy, counting bytes read and written.
  absl::Status AddCopy(const GpuLanes& dense) {
    if (copy_rate_ != 0) return absl::OkStatus();
    cuda::Scratch target(runtime_);
    const std::uint64_t bytes = dense.bytes() / 2;
    absl::Status status = GpuStatus(target.Grow(bytes));
    if (!status.ok()) return status;
    std::vector<Replayed> copy(1);
    copy[0] = {.name = "copy",
               .work = [&] { return queue_->Copy(target.at(), dense.data(), bytes); }};
    status = Replay(copy, "copy");
    copy_rate_ = 2e-9 * static_cast<double>(bytes) / Median(copy[0].seconds);
    report_.Add({.name = "copy", .value = copy_rate_, .unit = "GB/s"});
    return status;
  }

  template <class LanesOf>
  absl::Status MeasureBatches(const std::vector<Variant>& variants, const LanesOf& of,
                              std::uint32_t context, std::uint32_t group, std::uint32_t batch,
                              std::uint32_t sequences) {
    const std::string prefix =
        Concat("d", size_.head_dim, "_g", group, "_ctx", context, "_b", batch, "_");
    std::vector<std::vector<std::unique_ptr<GpuAttention>>> attentions;
    std::vector<Replayed> all;
    for (std::size_t v = 0; v < variants.size(); ++v) {
      auto& layers = attentions.emplace_back();
      for (std::uint32_t first = 0; first + batch <= sequences; first += batch) {
        absl::StatusOr<std::unique_ptr<GpuAttention>> one =
            GpuAttention::Prepare(runtime_, *queue_, of(v),
                                  {.first = first,
                                   .count = batch,
                                   .kv_heads = size_.kv_heads,
                                   .group = group,
                                   .rate = variants[v].rate});
        if (!one.ok()) return one.status();
        layers.push_back(*std::move(one));
      }
    }
    const auto each = [](auto& layers, cuda::Error (GpuAttention::*act)()) {
      return [&layers, act] {
        cuda::Error error;
        for (const auto& layer : layers) {
          if (error.ok()) error = (layer.get()->*act)();
        }
        return error;
      };
    };
    for (std::size_t v = 0; v < variants.size(); ++v) {
      auto& layers = attentions[v];
      const auto count = static_cast<std::uint32_t>(layers.size());
      all.push_back({.name = variants[v].name,
                     .work = each(layers, &GpuAttention::Attend),
                     .bytes = BytesRead(variants[v], of(v).host(), batch * size_.kv_heads),
                     .layers = count});
      if (variants[v].rate < 1) {
        all.push_back({.name = Concat(variants[v].name, "_choice"),
                       .work = each(layers, &GpuAttention::Select),
                       .layers = count});
      }
    }
    if (absl::Status status = Replay(all, prefix); !status.ok()) return status;
    for (std::size_t v = 0; v < variants.size(); ++v) {
      const absl::StatusOr<double> error = attentions[v].front()->Error();
      if (!error.ok()) return error.status();
      worst_error_ = std::max(worst_error_, *error);
      if (*error <= kMostError) continue;
      return absl::InternalError(Concat(prefix, variants[v].name, ": outputs differ by ", *error,
                                        " of their root mean square from the CPU's"));
    }
    AddRows(prefix, variants, all, batch * size_.kv_heads * context);
    return absl::OkStatus();
  }

  void AddRows(const std::string& prefix, const std::vector<Variant>& variants,
               const std::vector<Replayed>& all, double tokens) {
    for (const Replayed& one : all) {
      Row row = {.name = prefix + one.name, .value = Median(one.seconds) * 1e6, .unit = "us"};
      if (one.bytes != 0) row.read_bytes = one.bytes / tokens;
      if (&one != all.data()) {
        std::vector<double> ratios;
        for (std::size_t i = 0; i < one.seconds.size(); ++i) {
          ratios.push_back(all[0].seconds[i] / one.seconds[i]);
        }
        row.baseline = "dense";
        row.ratio = Median(ratios);
        row.paired = true;
      }
      report_.Add(std::move(row));
    }
    for (const Variant& variant : variants) {
      if (!variant.against_copy) continue;
      const Replayed& one = *std::ranges::find(all, variant.name, &Replayed::name);
      const double rate = one.bytes * 1e-9 / Median(one.seconds);
      report_.Add({.name = prefix + variant.name + "_rate",
                   .value = rate,
                   .unit = "GB/s",
                   .baseline = "copy",
                   .ratio = rate / copy_rate_});
    }
  }

  cuda::Runtime& runtime_;
  const GpuBenchSize size_;
  Report& report_;
  client::ThreadTeam team_;
  std::unique_ptr<cuda::Queue> queue_;
  double copy_rate_ = 0;  // GB/s
  double worst_error_ = 0;
};

GpuBenchSize SizeOf(const Options& options) {
  GpuBenchSize size = {.threads = options.threads != 0 ? options.threads
                                                       : std::thread::hardware_concurrency()};
  if (options.quick) {
    size.contexts = {131072};
    size.rounds = 5;
  }
  return size;
}

}  // namespace

absl::StatusOr<Report> RunGpuOn(cuda::RuntimeSource& gpus, const GpuBenchSize& size) {
  std::string reason;
  const std::unique_ptr<cuda::Runtime> runtime = gpus.Open(0, &reason);
  if (runtime == nullptr) {
    return absl::FailedPreconditionError(Concat("bench gpu: device cuda:0: ", reason));
  }
  Report report{.name = "gpu"};
  GpuBench bench(*runtime, size, report);
  if (absl::Status status = bench.Run(); !status.ok()) return status;
  report.notes.push_back(Concat(
      "kernels ", runtime->implementation(), "; bf16 K and V, ", size.kv_heads,
      " kv heads. us: one layer's attention of the batch, replayed as a graph. ratio: time of "
      "dense "
      "attention divided by the row's, median within rounds; for GB/s, the row's rate divided by "
      "that of a device copy (read and written). read: bytes per token and kv head. ctx: tokens. "
      "b: sequences in the batch; b1: as many sequences one after another. _choice: only scores "
      "and the selection of blocks. select: blocks of 16 entries"));
  report.notes.push_back(
      Concat("largest difference from the CPU's outputs: ", Figure(bench.worst_error()),
             " of their root mean square (limit ", kMostError, ")"));
  return report;
}

absl::StatusOr<Report> RunGpu(const Options& options) {
  return RunGpuOn(cuda::SystemGpus(), SizeOf(options));
}

}  // namespace tessera::cli::bench
