// tessera bench strategy: time to compute a segment's strategy, and to encode a full update buffer
// (one tile) with it. One thread.

#include "kernels/strategy/strategy.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "client/bench/bench.h"
#include "client/step/thread_team.h"
#include "client/bench/workload/generated_kv.h"
#include "client/bench/workload/kept_rows.h"
#include "client/bench/workload/working_set.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/strategy/aligned_bytes.h"
#include "kernels/strategy/eigen.h"

namespace tessera::cli::bench {

namespace {

constexpr std::uint32_t kSegmentTokens = 4096;
// The model whose cost per token is reported.
constexpr std::uint32_t kLayers = 32;
constexpr std::uint32_t kKvHeads = 8;
constexpr std::uint32_t kQueryHeads = 32;
constexpr std::uint32_t kLanes = kLayers * kKvHeads;

struct Step {
  std::string name;
  std::uint32_t times = 1;  // calls per measurement
  std::function<void()> act;
  std::vector<double> seconds = {};  // per call, by round
};

// Each round measures every step, so that a disturbance affects all steps.
void Measure(std::uint32_t rounds, std::vector<Step>& steps) {
  for (std::uint32_t round = 0; round <= rounds; ++round) {
    Progress(Concat("measuring, round ", round, " of ", rounds));
    for (Step& step : steps) {
      const auto begun = std::chrono::steady_clock::now();
      for (std::uint32_t i = 0; i < step.times; ++i) step.act();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun;
      if (round > 0) step.seconds.push_back(taken.count() / step.times);
    }
  }
}

// The median over rounds of the steps' sum.
double MedianOf(const std::vector<const Step*>& steps) {
  std::vector<double> sums(steps.front()->seconds.size());
  for (const Step* step : steps) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += step->seconds[i];
  }
  return Median(sums);
}

double MedianRatio(const Step& step, const Step& against) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < step.seconds.size(); ++i) {
    ratios.push_back(step.seconds[i] / against.seconds[i]);
  }
  return Median(ratios);
}

// A segment, its strategy, and one update buffer per lane of the model. Every lane has its own copy
// of rows, rotations and moments (equal values), so that no lane finds its data in a CPU cache
// because of the previous lane.
class Scene {
 public:
  explicit Scene(const GeneratedKv& kv)
      : segment_(kv.Rows(0, 0, kSegmentTokens)),
        keys_(kv.shape().head_dim),
        values_(kv.shape().head_dim) {
    AddMoments(segment_, keys_, values_);
    strategy_ = Make();
    const std::size_t bytes =
        BenchOperations().prepared_bytes(strategy_.shape, kernels::ElementType::kBf16);
    prepared_.resize(bytes);
    const kernels::LaneRows full = kv.Rows(0, kSegmentTokens, kernels::kTileEntries);
    lanes_.reserve(kLanes);
    while (lanes_.size() < kLanes) {
      Lane& lane = lanes_.emplace_back(kv.shape().head_dim);
      const std::size_t side = full.keys.row_bytes() * kernels::kTileEntries;
      lane.rows.resize(2 * side);
      std::memcpy(lane.rows.data(), full.keys.data, side);
      std::memcpy(lane.rows.data() + side, full.values.data, side);
      lane.buffer = full;
      lane.buffer.keys.data = lane.rows.data();
      lane.buffer.values.data = lane.rows.data() + side;
      lane.rotations = strategy_.rotations;
      const kernels::TileLayout layout = kernels::LayoutOf(strategy_.shape);
      lane.tile.resize(layout.bytes);
      lane.summaries.resize(layout.summary_bytes);
    }
  }

  kernels::Strategy Make() const {
    return kernels::MakeStrategy(segment_, keys_, values_, {}, BenchOperations());
  }
  void Decompose() const { kernels::Decompose(keys_); }
  void SumUpSegment() const {
    kernels::Moments keys(keys_.head_dim());
    kernels::Moments values(keys_.head_dim());
    AddMoments(segment_, keys, values);
  }

  // As the daemon does it: prepares the lane's rotations, then encodes, lane after lane.
  void Encode() {
    Lane& lane = lanes_[encoded_++ % kLanes];
    kernels::RotationView rotation = strategy_.view();
    const auto moved = [&](const std::byte* data) {
      return lane.rotations.data() + (data - strategy_.rotations.data());
    };
    rotation.key = moved(rotation.key);
    rotation.value = moved(rotation.value);
    BenchOperations().prepare_encode(strategy_.shape, kernels::ElementType::kBf16, rotation,
                                     prepared_.data());
    all_encoded_ &= BenchOperations().encode({.key = lane.buffer.keys.data,
                                              .value = lane.buffer.values.data,
                                              .stride = lane.buffer.keys.row_bytes(),
                                              .type = lane.buffer.keys.type,
                                              .rows = kernels::kTileEntries,
                                              .weights = nullptr,
                                              .positions = nullptr,
                                              .shape = strategy_.shape,
                                              .layout = kernels::LayoutOf(strategy_.shape),
                                              .prepared = prepared_.data(),
                                              .tile = lane.tile.data(),
                                              .summaries = lane.summaries.data()});
  }
  void JudgeTile() {
    const Lane& lane = lanes_[judged_++ % kLanes];
    loss_ +=
        kernels::LossOfTile(lane.buffer, strategy_.shape, lane.tile.data(), BenchOperations()).key;
  }
  void SumUpTile() {
    Lane& lane = lanes_[summed_++ % kLanes];
    AddMoments(lane.buffer, lane.keys, lane.values);
  }

  const kernels::Strategy& strategy() const { return strategy_; }
  bool all_encoded() const { return all_encoded_; }

 private:
  static void AddMoments(const kernels::LaneRows& rows, kernels::Moments& keys,
                         kernels::Moments& values) {
    keys.Add(rows.keys, BenchOperations());
    values.Add(rows.values, BenchOperations());
  }

  struct Lane {
    explicit Lane(std::uint32_t head_dim) : keys(head_dim), values(head_dim) {}
    kernels::AlignedBytes rows;  // K, then V
    kernels::LaneRows buffer;    // points into `rows`
    kernels::AlignedBytes rotations;
    kernels::AlignedBytes tile;
    kernels::AlignedBytes summaries;
    kernels::Moments keys;
    kernels::Moments values;
  };

  kernels::LaneRows segment_;
  kernels::Moments keys_;
  kernels::Moments values_;
  kernels::Strategy strategy_;
  kernels::AlignedBytes prepared_;
  std::vector<Lane> lanes_;
  std::uint64_t encoded_ = 0;
  std::uint64_t judged_ = 0;
  std::uint64_t summed_ = 0;
  double loss_ = 0;
  bool all_encoded_ = true;
};

void AddSegmentRows(const std::vector<Step>& steps, std::uint32_t head_dim, Report& report) {
  const std::string size = Concat("_d", head_dim);
  const Step& eigen = steps[0];
  const std::string baseline = Concat("eigen", size);
  report.Add({.name = baseline, .value = MedianOf({&eigen}) * 1e3, .unit = "ms"});
  for (const Step* step : {&steps[1], &steps[2]}) {
    report.Add({.name = step->name + size,
                .value = MedianOf({step}) * 1e3,
                .unit = "ms",
                .baseline = baseline,
                .ratio = MedianRatio(*step, eigen),
                .paired = true,
                .sense = Goal::kAtMost});
  }
  report.Add({.name = Concat("strategies_per_second", size),
              .value = 1 / MedianOf({&steps[1], &steps[2]}),
              .unit = "1/s/core"});
}

// One decode step's attention in one layer over 64K dense tokens, on one thread: the baseline of
// the update buffer's share.
class DenseStep {
 public:
  static absl::StatusOr<std::unique_ptr<DenseStep>> Make(std::uint32_t head_dim) {
    client::ThreadTeam alone(1);
    absl::StatusOr<std::unique_ptr<LaneSet>> lanes =
        LaneSet::Random({.lanes = kKvHeads,
                         .tokens = kContext,
                         .tile = kernels::DenseShape(head_dim, kernels::ElementType::kBf16)},
                        alone);
    if (!lanes.ok()) return lanes.status();
    return std::unique_ptr<DenseStep>(new DenseStep(*std::move(lanes)));
  }
  void Attend() {
    kernels::InlineExecutor executor;
    attended_ &=
        kernels::Attend(kernels::BestImplementation(), batch_, workspace_, executor).status ==
        kernels::AttendStatus::kOk;
  }
  bool attended() const { return attended_; }

  static constexpr std::uint32_t kContext = 65536;

 private:
  explicit DenseStep(std::unique_ptr<LaneSet> lanes) : lanes_(std::move(lanes)) {
    const std::uint32_t dim = lanes_->shape().tile.head_dim;
    query_.assign(kQueryHeads * dim, 0x3c00);
    output_.resize(query_.size());
    for (std::uint32_t head = 0; head < kKvHeads; ++head) {
      items_.push_back({.lane = &lanes_->lane(head),
                        .kv_head = head,
                        .first_query_position = kContext - 1,
                        .query = query_.data(),
                        .output = output_.data()});
    }
    batch_ = {.geometry = {.query_heads = kQueryHeads,
                           .kv_heads = kKvHeads,
                           .head_dim = dim,
                           .type = kernels::ElementType::kBf16,
                           .scale = 1 / std::sqrt(static_cast<float>(dim))},
              .items = items_};
    workspace_.resize(kernels::AttendWorkspaceBytes(batch_));
  }

  std::unique_ptr<LaneSet> lanes_;
  std::vector<std::uint16_t> query_;
  std::vector<float> output_;
  std::vector<kernels::AttendItem> items_;
  kernels::AttendBatch batch_;
  kernels::AlignedBytes workspace_;
  bool attended_ = true;
};

void AddTileRows(const std::vector<Step>& steps, std::uint32_t head_dim, Report& report) {
  const std::string size = Concat("_d", head_dim);
  const std::string baseline = Concat("encode_tile", size);
  report.Add({.name = baseline, .value = MedianOf({&steps[3]}) * 1e6, .unit = "us/tile"});
  for (const Step* step : {&steps[4], &steps[5]}) {
    report.Add({.name = step->name + size,
                .value = MedianOf({step}) * 1e6,
                .unit = "us/tile",
                .baseline = baseline,
                .ratio = MedianRatio(*step, steps[3]),
                .paired = true,
                .sense = Goal::kAtMost});
  }
  const double tile = MedianOf({&steps[3], &steps[4], &steps[5]});
  report.Add({.name = Concat("update_buffer", size), .value = tile * 1e6, .unit = "us/tile"});
  report.Add({.name = Concat("update_buffer", size, "_", kLayers, "x", kKvHeads),
              .value = tile * 1e6 * kLayers * kKvHeads / kernels::kTileEntries,
              .unit = "us/token"});
  // Both per lane: a token's share of a tile, and the attention of a step.
  const double dense = MedianOf({&steps[6]}) / kKvHeads;
  report.Add({.name = Concat("dense_step", size, "_64k"), .value = dense * 1e6, .unit = "us/lane"});
  report.Add({.name = Concat("update_buffer", size, "_share_of_64k"),
              .value = 100 * tile / kernels::kTileEntries / dense,
              .unit = "%",
              .baseline = Concat("dense_step", size, "_64k")});
}

absl::Status MeasureHeadDim(std::uint32_t head_dim, const Options& options, Report& report) {
  GeneratedShape shape = {.kv_heads = 1};
  shape.head_dim = head_dim;
  shape.tokens = kSegmentTokens + kernels::kTileEntries;
  const GeneratedKv kv(shape, options.seed);
  Scene scene(kv);
  const absl::StatusOr<std::unique_ptr<DenseStep>> dense = DenseStep::Make(head_dim);
  if (!dense.ok()) return dense.status();
  constexpr std::uint32_t kTiles = kLanes;
  std::vector<Step> steps = {
      {.name = "eigen", .times = 4, .act = [&] { scene.Decompose(); }},
      {.name = "moments_of_segment", .act = [&] { scene.SumUpSegment(); }},
      {.name = "make_strategy", .act = [&] { scene.Make(); }},
      {.name = "encode_tile", .times = kTiles, .act = [&] { scene.Encode(); }},
      {.name = "loss_of_tile", .times = kTiles, .act = [&] { scene.JudgeTile(); }},
      {.name = "moments_of_tile", .times = kTiles, .act = [&] { scene.SumUpTile(); }}};
  steps.push_back({.name = "dense_step", .act = [&] { (*dense)->Attend(); }});
  Measure(options.quick ? 7 : 21, steps);
  if (!(*dense)->attended()) return absl::InternalError("attention of the dense step failed");
  if (!scene.all_encoded()) return absl::InternalError("encoding a generated tile failed");
  AddSegmentRows(steps, head_dim, report);
  AddTileRows(steps, head_dim, report);
  const kernels::TileShape& chosen = scene.strategy().shape;
  report.notes.push_back(Concat("d", head_dim, ": the strategy keeps ", chosen.key.kept, " of ",
                                chosen.key.channels, " channels in groups of ",
                                std::uint32_t{chosen.group}, ", blocks of ",
                                std::uint32_t{chosen.block}));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Report> RunStrategy(const Options& options) {
  Report report{.name = "strategy"};
  for (const std::uint32_t head_dim : {128u, 64u}) {
    if (options.quick && head_dim != 128) continue;
    const absl::Status status = MeasureHeadDim(head_dim, options, report);
    if (!status.ok()) return status;
  }
  report.notes.push_back(Concat(
      "generated bf16 rows, seed ", options.seed, ", one lane, one thread. Segments of ",
      kSegmentTokens, " tokens, tiles of ", kernels::kTileEntries,
      ". All rows cover K and V, except eigen: one matrix in double. strategies: including the "
      "segment's moments. update_buffer: encode, loss and moments. Medians over rounds"));
  return report;
}

}  // namespace tessera::cli::bench
