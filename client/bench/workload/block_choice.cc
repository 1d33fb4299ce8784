#include "client/bench/workload/block_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <vector>

#include "daemon/base/strings.h"
#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/strategy/aligned_bytes.h"

namespace tessera::cli::bench {

namespace {

using kernels::kTileEntries;
using Taken = std::vector<std::uint8_t>;  // per token

// One kv head in tiles with block summaries.
class SummarisedLane {
 public:
  SummarisedLane() = default;
  SummarisedLane(SummarisedLane&&) = default;

  // Appends a segment, encoded to tiles of this shape.
  absl::Status Add(const kernels::LaneRows& rows, const kernels::TileShape& shape,
                   const kernels::RotationView& rotation);
  // The tokens that attention would read.
  absl::StatusOr<Taken> Select(std::span<const std::uint16_t> queries, std::uint32_t heads,
                               double rate) const;

 private:
  struct Segment {
    kernels::AlignedBytes tiles;
    std::vector<std::uint64_t> offsets;
    kernels::SegmentView view;
  };
  std::vector<Segment> segments_;
  std::uint32_t tokens_ = 0;
};

absl::Status SummarisedLane::Add(const kernels::LaneRows& rows, const kernels::TileShape& shape,
                                 const kernels::RotationView& rotation) {
  const kernels::Operations& operations = BenchOperations();
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  kernels::AlignedBytes prepared;
  if (shape.packed()) {
    prepared.resize(operations.prepared_bytes(shape, rows.keys.type));
    operations.prepare_encode(shape, rows.keys.type, rotation, prepared.data());
  }
  const auto entries = static_cast<std::uint32_t>(rows.keys.count);
  const std::uint64_t stride = (kernels::TileAndSummaryBytes(layout) + 63) / 64 * 64;
  const std::uint32_t tiles = (entries + kTileEntries - 1) / kTileEntries;
  Segment segment;
  segment.tiles.resize(tiles * stride);
  for (std::uint32_t i = 0; i < tiles; ++i) {
    const std::uint32_t first = i * kTileEntries;
    segment.offsets.push_back(i * stride);
    std::byte* const tile = segment.tiles.data() + i * stride;
    if (!operations.encode({.key = rows.keys.row(first),
                            .value = rows.values.row(first),
                            .stride = rows.keys.row_bytes(),
                            .type = rows.keys.type,
                            .rows = std::min(kTileEntries, entries - first),
                            .weights = nullptr,
                            .positions = nullptr,
                            .shape = shape,
                            .layout = layout,
                            .prepared = prepared.empty() ? nullptr : prepared.data(),
                            .tile = tile,
                            .summaries = kernels::SummariesAfter(tile, layout)})) {
      return absl::InternalError(Concat("encoding the tile of entry ", first, " failed"));
    }
  }
  segment.view = {.arena = segment.tiles.data(),
                  .arena_bytes = segment.tiles.size(),
                  .tile_offsets = segment.offsets.data(),
                  .first_position = tokens_,
                  .entries = entries,
                  .shape = shape,
                  .rotation = rotation};
  tokens_ += entries;
  segments_.push_back(std::move(segment));
  return absl::OkStatus();
}

class TakenSink final : public kernels::SelectionSink {
 public:
  TakenSink(const std::vector<kernels::SegmentView>& segments, Taken& taken)
      : segments_(segments), taken_(taken) {}
  void Take(std::uint32_t, const kernels::SelectedRun& run) override {
    const std::uint64_t first = segments_[run.segment].first_position + run.first_entry;
    std::fill_n(taken_.begin() + static_cast<std::ptrdiff_t>(first), run.entries, 1);
  }

 private:
  const std::vector<kernels::SegmentView>& segments_;
  Taken& taken_;
};

absl::StatusOr<Taken> SummarisedLane::Select(std::span<const std::uint16_t> queries,
                                             std::uint32_t heads, double rate) const {
  std::vector<kernels::SegmentView> views;
  for (const Segment& segment : segments_) views.push_back(segment.view);
  const std::uint32_t dim = views.front().shape.head_dim;
  const kernels::LaneView lane = {.segments = views.data(),
                                  .segment_count = static_cast<std::uint32_t>(views.size())};
  const kernels::SelectionRule rule = {.rate = rate};
  std::vector<float> output(queries.size());
  const kernels::AttendItem item = {.lane = &lane,
                                    .kv_head = 0,
                                    .queries = 1,
                                    .first_query_position = tokens_ - 1,
                                    .query = queries.data(),
                                    .output = output.data(),
                                    .selection = &rule};
  const kernels::AttendBatch batch = {.geometry = {.query_heads = heads,
                                                   .kv_heads = 1,
                                                   .head_dim = dim,
                                                   .type = kernels::ElementType::kBf16,
                                                   .scale = 1 / std::sqrt(static_cast<float>(dim))},
                                      .items = {&item, 1}};
  kernels::AlignedBytes workspace(kernels::AttendWorkspaceBytes(batch));
  kernels::InlineExecutor inline_executor;
  Taken taken(tokens_);
  TakenSink sink(views, taken);
  const kernels::AttendResult result =
      kernels::Select(kernels::BestImplementation(), batch, workspace, inline_executor, sink);
  if (result.status != kernels::AttendStatus::kOk) {
    return absl::InternalError("the selection kernel rejected the benchmark's lane");
  }
  return taken;
}

// The same number of blocks, chosen by the group's true attention mass.
Taken Ideal(std::span<const Examination::Question> group, const BlockRule& rule) {
  const std::size_t tokens = group.front().truth.weights.size();
  std::vector<double> masses((tokens + rule.block - 1) / rule.block);
  for (const Examination::Question& question : group) {
    for (std::size_t t = 0; t < tokens; ++t) masses[t / rule.block] += question.truth.weights[t];
  }
  std::vector<std::size_t> order(masses.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return masses[a] > masses[b]; });
  Taken taken(tokens);
  const double budget = std::ceil(rule.rate * static_cast<double>(tokens) - 1e-6);
  double held = 0;
  for (const std::size_t block : order) {
    if (held >= budget) break;
    for (std::size_t t = block * rule.block; t < std::min(tokens, (block + 1) * rule.block); ++t) {
      taken[t] = 1;
      ++held;
    }
  }
  return taken;
}

void Add(std::span<const Examination::Question> group, const FloatLane& lane, const Taken& taken,
         double share, Fidelity& sum) {
  for (const Examination::Question& question : group) {
    const Fidelity fidelity = Compare(Attend(question.query.row, lane, taken), question.truth);
    sum.error += fidelity.error * share;
    sum.kept_mass += fidelity.kept_mass * share;
  }
}

// One head's lane with each kind of summary.
struct HeadLanes {
  SummarisedLane mean;
  SummarisedLane min_max;
  SummarisedLane packed_mean;
  std::vector<kernels::Strategy> strategies;  // referenced by packed_mean's segments
};

absl::Status Fill(const Examination& examination, std::uint32_t kv_head, const BlockRule& rule,
                  HeadLanes& lanes) {
  const std::vector<Examination::Segment>& segments = examination.segments();
  lanes.strategies.reserve(segments.size());
  for (const Examination::Segment& segment : segments) {
    if (segment.kv_head != kv_head) continue;
    kernels::TileShape dense =
        kernels::DenseShape(segment.rows.keys.head_dim, kernels::ElementType::kBf16);
    dense.block = static_cast<std::uint8_t>(rule.block);
    dense.summary = kernels::Summary::kMean;
    if (absl::Status status = lanes.mean.Add(segment.rows, dense, {}); !status.ok()) return status;
    dense.summary = kernels::Summary::kMinMax;
    if (absl::Status status = lanes.min_max.Add(segment.rows, dense, {}); !status.ok()) {
      return status;
    }
    kernels::StrategyOptions options = FixedOptions(0.25, 1);
    options.summary = kernels::Summary::kMean;
    options.blocks = {rule.block};
    lanes.strategies.push_back(StrategyFor(segment.rows, options));
    const kernels::Strategy& strategy = lanes.strategies.back();
    absl::Status status = lanes.packed_mean.Add(segment.rows, strategy.shape, strategy.view());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BlockScores> MeasureBlocks(const Examination& examination, const BlockRule& rule) {
  const GeneratedShape& shape = examination.kv().shape();
  BlockScores scores;
  for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
    HeadLanes lanes;
    if (absl::Status status = Fill(examination, h, rule, lanes); !status.ok()) return status;
    const std::vector<Examination::Question>& questions = examination.questions(h);
    const double share = 1.0 / static_cast<double>(questions.size() * shape.kv_heads);
    for (std::size_t first = 0; first < questions.size(); first += shape.group) {
      const std::span group = std::span(questions).subspan(first, shape.group);
      Add(group, examination.lane(h), Ideal(group, rule), share, scores.ideal);
      std::vector<std::uint16_t> rows;
      for (const Examination::Question& question : group) {
        rows.insert(rows.end(), question.query.row.begin(), question.query.row.end());
      }
      struct Judge {
        const SummarisedLane& lane;
        Fidelity& sum;
      };
      for (const Judge& judge :
           {Judge{lanes.mean, scores.mean}, Judge{lanes.min_max, scores.min_max},
            Judge{lanes.packed_mean, scores.packed_mean}}) {
        const absl::StatusOr<Taken> taken = judge.lane.Select(rows, shape.group, rule.rate);
        if (!taken.ok()) return taken.status();
        Add(group, examination.lane(h), *taken, share, judge.sum);
      }
    }
  }
  return scores;
}

}  // namespace tessera::cli::bench
