// tessera bench attend: how close dense attention comes to merely reading the memory it reads.
//
// One working set of dense tiles, well beyond the last-level cache, in a shared mapping like a
// pool's. In every round the same threads read it three ways, one after another: a streaming
// checksum, attention with one query head per kv head, attention with four. A row's value is the
// median over rounds, its ratio the median of the ratio within a round.

#include "kernels/dispatch/attend.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "client/cli/bench/bench.h"
#include "client/cli/bench/stream.h"
#include "client/cli/bench/threads.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "daemon/platform/memfd.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cli::bench {

namespace {

constexpr std::uint32_t kHeadDim = 128;
constexpr std::uint32_t kKvHeads = 8;
constexpr kernels::DenseTile kTile = {kHeadDim, kernels::ElementType::kBf16};

double SecondsOf(const auto& act) {
  const auto begun = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Lanes of dense tiles in one shared mapping, lane after lane, tiles in order.
class WorkingSet {
 public:
  static absl::StatusOr<std::unique_ptr<WorkingSet>> Create(std::uint64_t bytes, ThreadTeam& team) {
    std::unique_ptr<WorkingSet> set(new WorkingSet());
    set->tiles_per_lane_ = static_cast<std::uint32_t>(bytes / kKvHeads / kTile.bytes());
    const std::uint64_t total = set->bytes();
    absl::StatusOr<Memfd> memory = Memfd::Create("tessera-bench", total);
    if (!memory.ok()) return memory.status();
    if (absl::Status status = memory->Prefault(); !status.ok()) return status;
    absl::StatusOr<AddressRange> range = AddressRange::Reserve(total);
    if (!range.ok()) return range.status();
    if (absl::Status status = range->MapAt(0, memory->fd(), total, Access::kReadWrite);
        !status.ok()) {
      return status;
    }
    set->memory_ = *std::move(memory);
    set->range_ = *std::move(range);
    set->Fill(team);
    return set;
  }

  std::uint64_t bytes() const { return std::uint64_t{tiles_per_lane_} * kKvHeads * kTile.bytes(); }
  std::uint32_t tokens() const { return tiles_per_lane_ * kernels::kTileEntries; }
  const std::byte* data() const { return range_.data(); }

  std::vector<kernels::LaneView> lanes() const {
    std::vector<kernels::LaneView> views;
    for (const kernels::SegmentView& segment : segments_) {
      views.push_back({.segments = &segment, .segment_count = 1});
    }
    return views;
  }

 private:
  WorkingSet() = default;

  void Fill(ThreadTeam& team) {
    struct Context {
      WorkingSet* set;
    } context{this};
    team.ParallelFor(
        kKvHeads,
        [](void* raw, std::uint32_t lane) {
          WorkingSet& set = *static_cast<Context*>(raw)->set;
          std::mt19937_64 random(lane + 1);
          std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
          // A pattern of one tile's worth of values, shifted from tile to tile: cheap and not zero.
          std::vector<std::uint16_t> pattern(2 * kTile.bytes() / 2);
          for (std::uint16_t& value : pattern) value = kernels::FloatToBf16(uniform(random));
          const std::uint64_t lane_bytes = std::uint64_t{set.tiles_per_lane_} * kTile.bytes();
          for (std::uint32_t tile = 0; tile < set.tiles_per_lane_; ++tile) {
            std::memcpy(set.range_.data() + lane * lane_bytes + tile * kTile.bytes(),
                        pattern.data() + random() % (kTile.bytes() / 2), kTile.bytes());
          }
        },
        &context);
    offsets_.resize(std::size_t{kKvHeads} * tiles_per_lane_);
    for (std::size_t i = 0; i < offsets_.size(); ++i) offsets_[i] = i * kTile.bytes();
    for (std::uint32_t lane = 0; lane < kKvHeads; ++lane) {
      segments_.push_back({.arena = range_.data(),
                           .arena_bytes = range_.bytes(),
                           .tile_offsets = offsets_.data() + std::size_t{lane} * tiles_per_lane_,
                           .entries = tokens(),
                           .shape = kernels::DenseShape(kHeadDim, kernels::ElementType::kBf16)});
    }
  }

  std::uint32_t tiles_per_lane_ = 0;
  Memfd memory_;
  AddressRange range_;
  std::vector<std::uint64_t> offsets_;
  std::vector<kernels::SegmentView> segments_;
};

// One attention call over all lanes, with its inputs and outputs.
class Attention {
 public:
  Attention(const WorkingSet& set, std::uint32_t group) : lanes_(set.lanes()) {
    const std::uint32_t heads = kKvHeads * group;
    query_.resize(std::size_t{heads} * kHeadDim);
    output_.resize(query_.size());
    lse_.resize(heads);
    std::mt19937_64 random(group);
    std::normal_distribution<float> normal;
    for (std::uint16_t& value : query_) value = kernels::FloatToBf16(normal(random));
    for (std::uint32_t lane = 0; lane < kKvHeads; ++lane) {
      items_.push_back({.lane = &lanes_[lane],
                        .kv_head = lane,
                        .first_query_position = set.tokens() - 1,
                        .query = query_.data(),
                        .output = output_.data(),
                        .lse = lse_.data()});
    }
    batch_ = {.geometry = {.query_heads = heads,
                           .kv_heads = kKvHeads,
                           .head_dim = kHeadDim,
                           .type = kernels::ElementType::kBf16,
                           .scale = 1 / std::sqrt(static_cast<float>(kHeadDim))},
              .items = items_};
    workspace_.resize(kernels::AttendWorkspaceBytes(batch_) + 64);
  }

  absl::Status Run(ThreadTeam& team) {
    void* start = workspace_.data();
    std::size_t space = workspace_.size();
    std::align(64, space - 64, start, space);
    const kernels::AttendResult result = kernels::Attend(
        kernels::BestImplementation(), batch_, {static_cast<std::byte*>(start), space}, team);
    return result.status == kernels::AttendStatus::kOk
               ? absl::OkStatus()
               : absl::InternalError("the attention kernel refused the benchmark's lanes");
  }

 private:
  std::vector<kernels::LaneView> lanes_;
  std::vector<std::uint16_t> query_;
  std::vector<float> output_;
  std::vector<float> lse_;
  std::vector<kernels::AttendItem> items_;
  kernels::AttendBatch batch_;
  std::vector<std::byte> workspace_;
};

std::uint64_t ReadAll(const WorkingSet& set, ThreadTeam& team) {
  constexpr std::uint32_t kPieces = 256;
  struct Context {
    const WorkingSet* set;
    std::atomic<std::uint64_t> sum{0};
  } context{&set};
  team.ParallelFor(
      kPieces,
      [](void* raw, std::uint32_t piece) {
        Context& shared = *static_cast<Context*>(raw);
        const std::uint64_t bytes = shared.set->bytes() / kPieces;
        shared.sum ^= StreamRead(shared.set->data() + piece * bytes, bytes);
      },
      &context);
  return context.sum;
}

}  // namespace

absl::StatusOr<Report> RunAttend(const Options& options) {
  ThreadTeam team(options.threads != 0 ? options.threads : std::thread::hardware_concurrency());
  const std::uint64_t bytes = options.quick ? kGiB : 4 * kGiB;
  const int rounds = options.quick ? 9 : 25;
  Progress(Concat("filling ", FormatBytes(bytes), " of dense tiles"));
  absl::StatusOr<std::unique_ptr<WorkingSet>> set = WorkingSet::Create(bytes, team);
  if (!set.ok()) return set.status();
  struct Variant {
    std::uint32_t group;
    double goal;
    std::vector<double> rates;
    std::vector<double> shares;
  };
  std::vector<Variant> variants = {{1, 0.80, {}, {}}, {4, 0.65, {}, {}}};
  std::vector<Attention> attentions;
  for (const Variant& variant : variants) attentions.emplace_back(**set, variant.group);

  std::vector<double> streams;
  std::uint64_t checksum = 0;
  const double gigabytes = static_cast<double>((*set)->bytes()) * 1e-9;
  for (int round = 0; round <= rounds; ++round) {
    Progress(Concat("round ", round, " of ", rounds, round == 0 ? " (warm-up)" : ""));
    const double stream = gigabytes / SecondsOf([&] { checksum ^= ReadAll(**set, team); });
    if (round > 0) streams.push_back(stream);
    for (std::size_t i = 0; i < variants.size(); ++i) {
      absl::Status status;
      const double rate = gigabytes / SecondsOf([&] { status = attentions[i].Run(team); });
      if (!status.ok()) return status;
      if (round == 0) continue;
      variants[i].rates.push_back(rate);
      variants[i].shares.push_back(rate / stream);
    }
  }
  Report report{.name = "attend"};
  report.Add({.name = "stream_read", .value = Median(streams), .unit = "GB/s"});
  for (const Variant& variant : variants) {
    report.Add({.name = Concat("dense_d128_g", variant.group, "_stream"),
                .value = Median(variant.rates),
                .unit = "GB/s",
                .baseline = "stream_read",
                .ratio = Median(variant.shares),
                .goal = variant.goal});
  }
  report.notes.push_back(Concat(FormatBytes((*set)->bytes()), " of bf16 K and V in ", kKvHeads,
                                " lanes of ", (*set)->tokens(), " tokens, ", team.threads(),
                                " threads, median of ", rounds, " rounds"));
  // The reads must really happen: their result is used.
  asm volatile("" : : "r"(checksum));
  return report;
}

}  // namespace tessera::cli::bench
