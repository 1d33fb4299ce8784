// tessera bench attend: compares packed and selected attention with dense attention over the same
// tokens and threads, and dense attention with a streaming read.
//
// For each head_dim and context there is one set of lanes per tile shape, encoded from the same
// rows and much larger than the last-level cache. Every round runs all variants one after another.
// A value is the median over rounds, a ratio the median of the ratios within a round.

#include "kernels/dispatch/attend.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "client/bench/bench.h"
#include "client/bench/gauge.h"
#include "client/bench/measure/stream.h"
#include "client/bench/workload/working_set.h"
#include "client/step/thread_team.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "daemon/platform/memory_limit.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cli::bench {

namespace {

constexpr std::uint32_t kKvHeads = 8;
// Minimum size of a set's dense K and V: a quarter of it exceeds every cache.
constexpr std::uint64_t kLeastDenseBytes = 512 * kMiB;

double SecondsOf(const auto& act) {
  const auto begun = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

struct Variant {
  const char* name;
  kernels::TileShape tile;
  double rate = 1;  // below 1: blocks are selected
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
  const kernels::TileShape near = kernels::PlanesShape(head_dim, {6, 4}, {4, 0});
  return {{"dense", dense},
          {"packed25_e1", packed},
          {"packed25_e2", PackedTile(head_dim, TileFormat::kPackedBf16, 2)},
          {"int8_e2", PackedTile(head_dim, TileFormat::kPackedInt8, 2)},
          {"quest625", quest, 0.0625},
          {"select625", coarse, 0.0625},
          {"select125", coarse, 0.125},
          {"select625_b8", packed, 0.0625},
          {"select125_b8", packed, 0.125},
          {"planes_near", near},
          {"planes_small", kernels::PlanesShape(head_dim, {4, 2}, {4, 2})},
          {"planes_near_signs20", kernels::WithSigns(near), 0.2}};
}

// Bytes that the variant's attention reads, per token and kv head.
double BytesRead(const Variant& variant, const LaneSet& set) {
  const kernels::TileLayout layout = kernels::LayoutOf(variant.tile);
  const double summaries = static_cast<double>(layout.summary_bytes) / kernels::kTileEntries;
  const double rows = static_cast<double>(layout.bytes) / kernels::kTileEntries;
  const double rotations = set.BytesPerToken() - set.TileBytesPerToken();
  return variant.rate * rows + (variant.rate < 1 ? summaries : 0) + rotations;
}

// Attention over all lanes of a set, with its inputs and outputs.
class Attention {
 public:
  Attention(const LaneSet& set, std::uint32_t group, std::uint32_t queries, double rate) {
    const std::uint32_t dim = set.shape().tile.head_dim;
    const std::uint32_t heads = kKvHeads * group;
    const std::uint32_t sequences = set.shape().lanes / kKvHeads;
    const std::size_t rows = std::size_t{queries} * heads;
    query_.resize(rows * dim * sequences);
    output_.resize(query_.size());
    lse_.resize(rows * sequences);
    rule_.rate = rate;
    if (set.shape().tile.summary == kernels::Summary::kSigns) {
      rule_.judge = kernels::SelectionRule::Judge::kLogit;
    }
    std::mt19937_64 random(group);
    std::normal_distribution<float> normal;
    for (std::uint16_t& value : query_) value = kernels::FloatToBf16(normal(random));
    for (std::uint32_t lane = 0; lane < set.shape().lanes; ++lane) {
      const std::size_t first = lane / kKvHeads * rows;
      items_.push_back({.lane = &set.lane(lane),
                        .kv_head = lane % kKvHeads,
                        .queries = queries,
                        .first_query_position = set.shape().tokens - 1,
                        .query = query_.data() + first * dim,
                        .output = output_.data() + first * dim,
                        .lse = lse_.data() + first,
                        .selection = rate < 1 ? &rule_ : nullptr});
    }
    batch_ = {.geometry = {.query_heads = heads,
                           .kv_heads = kKvHeads,
                           .head_dim = dim,
                           .type = kernels::ElementType::kBf16,
                           .scale = 1 / std::sqrt(static_cast<float>(dim))},
              .items = items_};
    workspace_.resize(kernels::AttendWorkspaceBytes(batch_) + 64);
  }
  Attention(Attention&&) = delete;  // items_ points into the object

  absl::StatusOr<double> Seconds(client::ThreadTeam& team) {
    void* start = workspace_.data();
    std::size_t space = workspace_.size();
    std::align(64, space - 64, start, space);
    kernels::AttendResult result;
    const double seconds = SecondsOf([&] {
      result = kernels::Attend(kernels::BestImplementation(), batch_,
                               {static_cast<std::byte*>(start), space}, team);
    });
    if (result.status == kernels::AttendStatus::kOk) return seconds;
    return absl::InternalError("the attention kernel rejected the benchmark's lanes");
  }

 private:
  kernels::SelectionRule rule_;
  std::vector<std::uint16_t> query_;
  std::vector<float> output_;
  std::vector<float> lse_;
  std::vector<kernels::AttendItem> items_;
  kernels::AttendBatch batch_;
  std::vector<std::byte> workspace_;
};

std::uint64_t ReadAll(const LaneSet& set, client::ThreadTeam& team) {
  constexpr std::uint32_t kPieces = 256;
  struct Context {
    const LaneSet* set;
    std::atomic<std::uint64_t> sum{0};
  } context{&set};
  team.ParallelFor(
      kPieces,
      [](void* raw, std::uint32_t piece) {
        Context& shared = *static_cast<Context*>(raw);
        const std::uint64_t bytes = shared.set->bytes() / kPieces / 64 * 64;
        shared.sum ^= StreamRead(shared.set->data() + piece * bytes, bytes);
      },
      &context);
  return context.sum;
}

struct Goals {
  std::uint32_t head_dim;
  std::uint32_t context;
  std::uint32_t group;
  const char* variant;
  double ratio;
  double on_avx2 = 0;  // if not 0: the goal on a CPU without AVX-512
};
constexpr Goals kGoals[] = {
    {128, 131072, 1, "packed25_e1", 1.9},       {128, 131072, 4, "packed25_e1", 1.5},
    {128, 131072, 1, "select625", 12},          {128, 131072, 4, "select625", 8},
    {128, 131072, 1, "planes_near", 2.8, 1.6},  {128, 131072, 4, "planes_near", 2.0, 1.2},
    {128, 131072, 1, "planes_near_signs20", 7}, {128, 131072, 4, "planes_near_signs20", 5},
};

std::optional<double> GoalOf(std::uint32_t head_dim, std::uint32_t context, std::uint32_t group,
                             std::string_view variant) {
  for (const Goals& goal : kGoals) {
    if (goal.head_dim == head_dim && goal.context == context && goal.group == group &&
        variant == goal.variant) {
      const bool avx2 = kernels::ImplementationName(kernels::BestImplementation()) == "avx2";
      return avx2 && goal.on_avx2 != 0 ? goal.on_avx2 : goal.ratio;
    }
  }
  return std::nullopt;
}

// The sets of one head_dim and context, and the report rows measured on them.
class Scene {
 public:
  Scene(std::uint32_t head_dim, std::uint32_t context, const Options& options,
        client::ThreadTeam& team, Report& report)
      : head_dim_(head_dim),
        context_(context),
        rounds_(options.quick ? 7 : 15),
        team_(team),
        report_(report),
        variants_(Variants(head_dim)) {}

  static std::uint32_t Lanes(std::uint32_t head_dim, std::uint32_t context) {
    const std::uint64_t dense = std::uint64_t{context} * head_dim * 4 * kKvHeads;
    return kKvHeads *
           static_cast<std::uint32_t>(std::max<std::uint64_t>(1, kLeastDenseBytes / dense));
  }
  // Size of all sets together.
  static std::uint64_t Bytes(std::uint32_t head_dim, std::uint32_t context) {
    std::uint64_t per_tile = 0;
    for (const Variant& variant : Variants(head_dim)) {
      per_tile += kernels::TileAndSummaryBytes(kernels::LayoutOf(variant.tile));
    }
    return per_tile * (context / kernels::kTileEntries) * Lanes(head_dim, context);
  }

  absl::Status Fill() {
    const std::uint32_t lanes = Lanes(head_dim_, context_);
    for (const Variant& variant : variants_) {
      Progress(
          Concat("d", head_dim_, " ctx", context_, ": filling ", lanes, " lanes, ", variant.name));
      const LaneSet* same = FindSet(variant.tile);
      if (same != nullptr) continue;
      absl::StatusOr<std::unique_ptr<LaneSet>> set =
          sets_.empty() ? LaneSet::Random({lanes, context_, variant.tile}, team_)
                        : LaneSet::Encoded(*sets_.front(), variant.tile, team_);
      if (!set.ok()) return set.status();
      sets_.push_back(*std::move(set));
    }
    return absl::OkStatus();
  }

  // Rows of one group size. `streams`: also measures a streaming read of the dense set.
  absl::Status Measure(std::uint32_t group, bool streams, double stream_goal) {
    std::deque<Attention> attentions;
    for (const Variant& variant : variants_) {
      attentions.emplace_back(*FindSet(variant.tile), group, 1, variant.rate);
    }
    std::vector<std::vector<double>> seconds(variants_.size());
    std::vector<double> reads;
    for (int round = 0; round <= rounds_; ++round) {
      Progress(Concat("d", head_dim_, " ctx", context_, " G", group, ": round ", round, " of ",
                      rounds_));
      if (streams) {
        const double read = SecondsOf([&] { checksum_ ^= ReadAll(*sets_.front(), team_); });
        if (round > 0) reads.push_back(read);
      }
      for (std::size_t v = 0; v < variants_.size(); ++v) {
        const absl::StatusOr<double> taken = attentions[v].Seconds(team_);
        if (!taken.ok()) return taken.status();
        if (round > 0) seconds[v].push_back(*taken);
      }
    }
    if (streams) AddStreamRows(group, reads, seconds.front(), stream_goal);
    for (std::size_t v = 0; v < variants_.size(); ++v) {
      AddRow(Concat("d", head_dim_, "_g", group, "_ctx", context_, "_"), variants_[v], seconds[v],
             v == 0 ? nullptr : &seconds.front(),
             GoalOf(head_dim_, context_, group, variants_[v].name), 1);
    }
    asm volatile("" : : "r"(checksum_));  // keeps the compiler from removing the reads
    return absl::OkStatus();
  }

  // A block of queries over the whole context, dense and packed.
  absl::Status MeasureQueries(std::uint32_t group, std::uint32_t queries) {
    constexpr int kRounds = 3;
    std::deque<Attention> attentions;
    for (int v : {0, 1}) {
      attentions.emplace_back(*FindSet(variants_[v].tile), group, queries, 1);
    }
    std::vector<std::vector<double>> seconds(2);
    for (int round = 0; round < kRounds; ++round) {
      Progress(Concat("d", head_dim_, " ctx", context_, " G", group, " nq", queries, ": round ",
                      round + 1, " of ", kRounds));
      for (int v : {0, 1}) {
        const absl::StatusOr<double> taken = attentions[v].Seconds(team_);
        if (!taken.ok()) return taken.status();
        seconds[v].push_back(*taken);
      }
    }
    const std::string prefix =
        Concat("d", head_dim_, "_g", group, "_ctx", context_, "_nq", queries, "_");
    AddRow(prefix, variants_[0], seconds[0], nullptr, std::nullopt, queries);
    AddRow(prefix, variants_[1], seconds[1], &seconds[0], 0.5, queries);
    return absl::OkStatus();
  }

  // Encoding on one thread, in bytes of raw K and V per second.
  void MeasureEncode() {
    MeasureEncode(PackedTile(head_dim_, kernels::TileFormat::kPackedBf16, 1), "encode", 0.5);
    MeasureEncode(kernels::PlanesShape(head_dim_, {6, 4}, {4, 0}), "encode_planes_near", 1.5);
  }

 private:
  void MeasureEncode(const kernels::TileShape& tile, const char* name, double goal) {
    const TileEncoder encoder(tile, FindSet(tile)->lane(0).segments[0].rotation);
    const kernels::TileLayout layout = kernels::LayoutOf(tile);
    std::vector<std::byte> target(layout.bytes);
    std::vector<std::byte> summaries(layout.summary_bytes);
    constexpr int kTiles = 2000;
    std::vector<double> rates;
    const double bytes = kTiles * static_cast<double>(sets_.front()->tile_bytes());
    for (int round = 0; round < rounds_; ++round) {
      Progress(Concat(name, ": round ", round + 1, " of ", rounds_));
      bool finite = true;
      const double taken = SecondsOf([&] {
        for (int i = 0; i < kTiles; ++i) {
          finite &= encoder.Encode(sets_.front()->Tile(static_cast<std::uint64_t>(i)),
                                   target.data(), summaries.data());
        }
      });
      if (finite) rates.push_back(bytes / taken * 1e-9);
    }
    report_.Add({.name = Concat(name, "_d", head_dim_, "_gb_per_s"),
                 .value = Median(rates),
                 .unit = "GB/s",
                 .goal = goal,
                 .goal_is_on_ratio = false});
  }

  const LaneSet* FindSet(const kernels::TileShape& tile) const {
    for (const std::unique_ptr<LaneSet>& set : sets_) {
      if (set->shape().tile == tile) return set.get();
    }
    return nullptr;
  }

  void AddStreamRows(std::uint32_t group, const std::vector<double>& reads,
                     const std::vector<double>& dense, double goal) {
    const double gigabytes = static_cast<double>(sets_.front()->bytes()) * 1e-9;
    std::vector<double> stream_rates;
    std::vector<double> rates;
    std::vector<double> shares;
    for (std::size_t i = 0; i < reads.size(); ++i) {
      stream_rates.push_back(gigabytes / reads[i]);
      rates.push_back(gigabytes / dense[i]);
      shares.push_back(reads[i] / dense[i]);
    }
    const std::string stream = Concat("stream_read_g", group);
    report_.Add({.name = stream, .value = Median(stream_rates), .unit = "GB/s"});
    report_.Add({.name = Concat("dense_d", head_dim_, "_g", group, "_stream"),
                 .value = Median(rates),
                 .unit = "GB/s",
                 .baseline = stream,
                 .ratio = Median(shares),
                 .paired = true,
                 .goal = goal});
  }

  void AddRow(const std::string& prefix, const Variant& variant, const std::vector<double>& seconds,
              const std::vector<double>* dense, std::optional<double> goal, std::uint32_t queries) {
    const LaneSet& set = *FindSet(variant.tile);
    const double tokens =
        static_cast<double>(context_) * set.shape().lanes * static_cast<double>(queries);
    Row row = {.name = prefix + variant.name,
               .value = Median(seconds) / tokens * 1e9,
               .unit = "ns/token",
               .held_bytes = set.BytesPerToken(),
               .read_bytes = BytesRead(variant, set)};
    if (dense != nullptr) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < seconds.size(); ++i) {
        ratios.push_back((*dense)[i] / seconds[i]);
      }
      row.baseline = "dense";
      row.ratio = Median(ratios);
      row.paired = true;
      row.goal = goal;
    }
    report_.Add(std::move(row));
  }

  const std::uint32_t head_dim_;
  const std::uint32_t context_;
  const int rounds_;
  client::ThreadTeam& team_;
  Report& report_;
  const std::vector<Variant> variants_;
  std::vector<std::unique_ptr<LaneSet>> sets_;
  std::uint64_t checksum_ = 0;
};

struct Extent {
  std::uint32_t head_dim;
  std::uint32_t context;
};

std::vector<Extent> Extents(bool quick) {
  if (quick) return {{128, 131072}};
  std::vector<Extent> extents;
  for (std::uint32_t head_dim : {128, 64}) {
    for (std::uint32_t context : {8192, 32768, 131072, 524288, 1048576}) {
      extents.push_back({head_dim, context});
    }
  }
  return extents;
}

absl::Status MeasureExtent(const Extent& extent, const Options& options, client::ThreadTeam& team,
                           Report& report) {
  Scene scene(extent.head_dim, extent.context, options, team, report);
  if (absl::Status status = scene.Fill(); !status.ok()) return status;
  const bool main = extent.head_dim == 128 && extent.context == 131072;
  for (std::uint32_t group :
       options.quick ? std::vector<std::uint32_t>{1, 4} : std::vector<std::uint32_t>{1, 4, 8}) {
    const bool streams = main && group <= 4;
    absl::Status status = scene.Measure(group, streams, group == 1 ? 0.80 : 0.65);
    if (!status.ok()) return status;
  }
  if (main) scene.MeasureEncode();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Report> RunAttend(const Options& options) {
  client::ThreadTeam team(options.threads != 0 ? options.threads
                                               : std::thread::hardware_concurrency());
  Report report{.name = "attend"};
  const absl::StatusOr<MemoryLimit> limit = DetectMemoryLimit();
  if (!limit.ok()) return limit.status();
  for (const Extent& extent : Extents(options.quick)) {
    const std::uint64_t bytes = Scene::Bytes(extent.head_dim, extent.context);
    if (bytes > limit->bytes / 10 * 6) {
      report.notes.push_back(Concat(
          "d", extent.head_dim, " ctx", extent.context, " skipped: it needs ", FormatBytes(bytes),
          ", more than 60 % of the memory (", FormatBytes(limit->bytes), ", ", limit->source, ")"));
      continue;
    }
    absl::Status status = MeasureExtent(extent, options, team, report);
    if (!status.ok()) return status;
  }
  Scene queries(128, 8192, options, team, report);
  absl::Status status = queries.Fill();
  if (status.ok()) status = queries.MeasureQueries(4, 256);
  if (status.ok())
    status = AddPoolGauge(PackedTile(128, kernels::TileFormat::kPackedBf16, 1), report);
  if (!status.ok()) return status;
  report.notes.push_back(Concat(
      "bf16 K and V, ", kKvHeads, " kv heads, ", team.threads(),
      " threads. ns/token: wall time per token and kv head. stored, read: bytes per token and kv "
      "head, with rotations of 64K segments. ratio: time of dense attention divided by the row's, "
      "median within rounds. select: blocks of 16 entries; _b8: blocks of 8"));
  return report;
}

}  // namespace tessera::cli::bench
