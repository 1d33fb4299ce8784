// Block selection: which blocks are selected, and that attention reads exactly those.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "kernels/dispatch/implementation.h"
#include "kernels/dispatch/per_head.h"
#include "tests/contract/attend/attend_conformance.h"
#include "tests/contract/attend/attend_packed_cases.h"
#include "tests/contract/attend/selection_budget.h"

namespace tessera::kernels {
namespace {

class Collect final : public SelectionSink {
 public:
  void Take(std::uint32_t item, const SelectedRun& run) override {
    EXPECT_EQ(item, 0u);
    runs.push_back(run);
  }
  std::vector<SelectedRun> runs;
};

SelectionRule AnyRule(TestRandom& random) {
  constexpr double kRates[] = {0, 0.01, 0.0625, 0.25, 0.5, 0.99, 1, 7};
  SelectionRule rule = {.rate = random.Pick(kRates)};
  if (random.OneIn(4)) rule.entries = 1 + random.Below(300);
  if (random.OneIn(4)) rule.floor = random.Below(300);
  if (random.OneIn(3)) rule.judge = SelectionRule::Judge::kLogit;
  rule.first_block = random.OneIn(2);
  rule.counts_tail = random.OneIn(2);
  return rule;
}

bool Selectable(const SegmentView& segment) { return segment.shape.block != 0; }

std::uint64_t PositionOfEntry(const SegmentView& segment, std::uint32_t entry) {
  if (!segment.shape.positions) return segment.first_position + entry;
  std::uint32_t word;
  std::memcpy(&word,
              segment.arena + segment.tile_offsets[entry / kTileEntries] +
                  LayoutOf(segment.shape).positions + entry % kTileEntries * sizeof word,
              sizeof word);
  return segment.first_position + word;
}

// A lane that keeps only these runs of each segment with summaries, at their original positions.
class Remainder {
 public:
  Remainder(const LaneView& lane, const std::vector<SelectedRun>& runs) : view_(lane) {
    segments_.assign(lane.segments, lane.segments + lane.segment_count);
    offsets_.resize(segments_.size());
    for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
      if (Selectable(segments_[s])) Keep(s, runs);
    }
    view_.segments = segments_.data();
  }
  const LaneView& view() const { return view_; }

 private:
  void Keep(std::uint32_t s, const std::vector<SelectedRun>& runs) {
    const SegmentView from = segments_[s];
    TileShape to = from.shape;
    to.positions = true;
    std::vector<GatherRow> rows;
    for (const SelectedRun& run : runs) {
      if (run.segment != s) continue;
      for (std::uint32_t e = run.first_entry; e < run.first_entry + run.entries; ++e) {
        rows.push_back({.tile = from.arena + from.tile_offsets[e / kTileEntries],
                        .row = e % kTileEntries,
                        .position = static_cast<std::uint32_t>(PositionOfEntry(from, e) -
                                                               from.first_position)});
      }
    }
    const TileLayout layout = LayoutOf(to);
    const std::uint64_t bytes = (TileAndSummaryBytes(layout) + 63) / 64 * 64;
    const std::size_t tiles = (rows.size() + kTileEntries - 1) / kTileEntries;
    arenas_.push_back(std::make_unique<Buffer>(std::max<std::size_t>(tiles, 1) * bytes));
    for (std::size_t t = 0; t < tiles; ++t) {
      const std::size_t left = rows.size() - t * kTileEntries;
      std::byte* const tile = arenas_.back()->data() + t * bytes;
      OperationsOf(*FindImplementation("reference"))
          .gather({.rows = rows.data() + t * kTileEntries,
                   .row_count = static_cast<std::uint32_t>(std::min<std::size_t>(32, left)),
                   .from = from.shape,
                   .from_layout = LayoutOf(from.shape),
                   .to = to,
                   .to_layout = layout,
                   .tile = tile,
                   .summaries = SummariesAfter(tile, layout)});
      offsets_[s].push_back(t * bytes);
    }
    segments_[s].arena = arenas_.back()->data();
    segments_[s].arena_bytes = arenas_.back()->size();
    segments_[s].tile_offsets = offsets_[s].data();
    segments_[s].summary_offsets = nullptr;
    segments_[s].position_span = from.positions();
    segments_[s].entries = static_cast<std::uint32_t>(rows.size());
    segments_[s].shape = to;
  }

  LaneView view_;
  std::vector<SegmentView> segments_;
  std::vector<std::vector<std::uint64_t>> offsets_;
  std::vector<std::unique_ptr<Buffer>> arenas_;
};

std::vector<SelectedRun> Choose(AttendSubject& subject, TestBatch& batch) {
  InlineExecutor executor;
  Collect sink;
  const AttendResult result = subject.Choose(batch.batch(), executor, sink);
  EXPECT_EQ(result.status, AttendStatus::kOk);
  EXPECT_EQ(result.implementation, subject.name()) << "something else has run";
  return sink.runs;
}

// A lane of several strategies, some with summaries, long enough for several parts.
Mixture AnyLane(const BatchShape& shape, TestRandom& random) {
  std::vector<std::uint32_t> entries(random.Below(4));
  for (std::uint32_t& count : entries) {
    count = static_cast<std::uint32_t>(random.Below(random.OneIn(3) ? 900 : 70));
  }
  return {shape,
          {.cut = true, .dense = true},
          entries,
          static_cast<std::uint32_t>(random.Below(40)),
          random};
}

// The visible entries of a block, counted one by one.
struct Block {
  std::uint32_t segment;
  std::uint32_t first;
  std::uint32_t entries;
  std::uint32_t visible;
  bool taken;
};

std::vector<Block> BlocksOfLane(const LaneView& lane, std::uint64_t begin, std::uint64_t end,
                                const std::vector<SelectedRun>& runs) {
  std::vector<Block> blocks;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    if (!Selectable(segment)) continue;
    for (std::uint32_t first = 0; first < segment.entries; first += segment.shape.block) {
      Block block = {
          .segment = s,
          .first = first,
          .entries = std::min<std::uint32_t>(segment.shape.block, segment.entries - first),
          .visible = 0,
          .taken = false};
      for (std::uint32_t e = first; e < first + block.entries; ++e) {
        const std::uint64_t position = PositionOfEntry(segment, e);
        if (position >= begin && position < end) ++block.visible;
      }
      for (const SelectedRun& run : runs) {
        block.taken |=
            run.segment == s && first >= run.first_entry && first < run.first_entry + run.entries;
      }
      blocks.push_back(block);
    }
  }
  return blocks;
}

// The range of positions visible to any query of the only item.
std::pair<std::uint64_t, std::uint64_t> VisibleRange(const AttendBatch& batch) {
  const AttendItem& item = batch.items[0];
  const std::uint64_t window = batch.geometry.sliding_window;
  const std::uint64_t first = item.first_query_position;
  const std::uint64_t begin = window != 0 && first >= window ? first - window + 1 : 0;
  const std::uint64_t end =
      batch.causal ? first + item.queries : std::numeric_limits<std::uint64_t>::max();
  return {begin, end};
}

TEST_P(AttendSelection, KeepsTheBudgetAndTheForcedBlocks) {
  for (int round = 0; round < subject().rounds(80); ++round) {
    const BatchShape shape = AnyBatch(random_);
    const Mixture mixture = AnyLane(shape, random_);
    const SelectionRule rule = AnyRule(random_);
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, static_cast<std::uint32_t>(random_.Between(1, 12)));
    batch.items()[0].selection = &rule;
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    const std::vector<SelectedRun> runs = Choose(subject(), batch);

    const LaneView& lane = mixture.lane->view();
    const auto [begin, end] = VisibleRange(batch.batch());
    const std::vector<Block> blocks = BlocksOfLane(lane, begin, end, runs);
    std::uint64_t visible = 0;
    std::uint64_t taken = 0;
    std::uint32_t largest = 0;
    for (const Block& block : blocks) {
      visible += block.visible;
      if (block.taken) {
        EXPECT_GT(block.visible, 0u) << "a block that nobody sees";
        taken += block.visible;
        largest = std::max(largest, block.visible);
      }
    }
    const std::uint64_t tail = RowsOfTail(lane, begin, end);
    const SegmentView last =
        lane.segment_count == 0 ? SegmentView() : lane.segments[lane.segment_count - 1];
    const bool newest = Selectable(last) &&
                        (last.entries % last.shape.block != 0 || (rule.counts_tail && tail == 0));
    std::uint64_t outside = 0;
    if (rule.counts_tail && !blocks.empty()) {
      const std::uint32_t block = lane.segments[blocks.back().segment].shape.block;
      outside = OutsideOfBlocks(tail + RowsOfLastTile(last, begin, end),
                                newest ? blocks.back().visible % block : 0, block);
    }
    const auto all = static_cast<double>(visible + outside);
    const double wanted = rule.entries != 0
                              ? static_cast<double>(rule.entries)
                              : std::max(std::min(std::ceil(rule.rate * all - 1e-6), all),
                                         static_cast<double>(rule.floor));
    const double budget =
        std::clamp(wanted - static_cast<double>(outside), 0.0, static_cast<double>(visible));
    std::uint64_t forced = 0;
    if (!blocks.empty()) {
      if (newest && blocks.back().visible != 0) {
        EXPECT_TRUE(blocks.back().taken);
        forced += blocks.back().visible;
      }
      // The option forces no block if the first segment has no entries.
      if (rule.first_block && blocks.front().segment == 0 && blocks.front().visible != 0) {
        EXPECT_TRUE(blocks.front().taken);
        if (blocks.size() > 1 || forced == 0) forced += blocks.front().visible;
      }
    }
    EXPECT_GE(static_cast<double>(taken), budget);
    // The selection exceeds its budget by less than a block.
    EXPECT_LT(static_cast<double>(taken),
              std::max(budget, static_cast<double>(forced)) + std::max(largest, 1u));
    for (std::size_t i = 1; i < runs.size(); ++i) {
      const bool apart = runs[i].segment > runs[i - 1].segment ||
                         runs[i].first_entry > runs[i - 1].first_entry + runs[i - 1].entries;
      EXPECT_TRUE(apart) << "runs are in lane order and do not touch";
    }
    if (HasFailure()) return;
  }
}

TEST_P(AttendSelection, ReadsWhatSelectTakesAndNothingElse) {
  for (int round = 0; round < subject().rounds(60); ++round) {
    const BatchShape shape = AnyBatch(random_);
    const Mixture mixture = AnyLane(shape, random_);
    const SelectionRule rule = AnyRule(random_);
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, static_cast<std::uint32_t>(random_.Between(1, 40)));
    batch.items()[0].selection = &rule;
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    const Remainder remainder(mixture.lane->view(), Choose(subject(), batch));
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    batch.items()[0].lane = &remainder.view();
    batch.items()[0].selection = nullptr;
    batch.Judge(subject(), random_);
    if (HasFailure()) return;
  }
}

TEST_P(AttendSelection, AllOfItIsTheSameAsNone) {
  for (int round = 0; round < 20; ++round) {
    const BatchShape shape = AnyBatch(random_);
    const Mixture mixture = AnyLane(shape, random_);
    const SelectionRule rule = {.rate = 1, .counts_tail = random_.OneIn(2)};
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, 3);
    batch.items()[0].selection = &rule;
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    batch.items()[0].selection = nullptr;
    batch.Judge(subject(), random_);
    if (HasFailure()) return;
  }
}

// Threads, order and other items of the batch change neither the selection nor the output bits.
TEST_P(AttendSelection, TheSameOnAnyExecutorAndInAnyBatch) {
  for (int round = 0; round < 10; ++round) {
    const BatchShape shape = AnyBatch(random_);
    const Mixture mixture = AnyLane(shape, random_);
    const SelectionRule rule = AnyRule(random_);
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, 5);
    batch.items()[0].selection = &rule;
    InlineExecutor straight;
    ReverseExecutor reverse;
    ThreadExecutor threads(4);
    ASSERT_EQ(batch.Run(subject(), straight).status, AttendStatus::kOk);
    const std::vector<std::byte> bytes = batch.OutputBytes();
    for (Executor* executor : std::initializer_list<Executor*>{&reverse, &threads}) {
      batch.Clear();
      ASSERT_EQ(batch.Run(subject(), *executor).status, AttendStatus::kOk);
      EXPECT_EQ(batch.OutputBytes(), bytes);
    }
  }
}

// Runs query head `head` of the only item alone, as a layer with one head.
struct OneHead {
  OneHead(AttendSubject& subject, const AttendBatch& all, std::uint32_t head) {
    const AttendItem& item = all.items[0];
    const std::size_t row = all.geometry.head_dim * ElementBytes(all.geometry.type);
    const std::size_t output_row = all.geometry.head_dim * ElementBytes(all.output_type);
    Buffer query(item.queries * row);
    Buffer result(item.queries * output_row);
    lse.resize(item.queries);
    for (std::uint32_t q = 0; q < item.queries; ++q) {
      std::memcpy(query.data() + q * row,
                  static_cast<const std::byte*>(item.query) +
                      (std::size_t{q} * all.geometry.query_heads + head) * row,
                  row);
    }
    SelectionRule rule = *item.selection;
    rule.each_head = false;
    AttendItem alone = item;
    alone.kv_head = 0;
    alone.query = query.data();
    alone.output = result.data();
    alone.lse = lse.data();
    alone.selection = &rule;
    AttendBatch batch = all;
    batch.geometry.query_heads = batch.geometry.kv_heads = 1;
    if (batch.geometry.sinks != nullptr) batch.geometry.sinks += head;
    batch.items = {&alone, 1};
    InlineExecutor executor;
    Collect sink;
    EXPECT_EQ(subject.Choose(batch, executor, sink).status, AttendStatus::kOk);
    EXPECT_EQ(subject.Run(batch, executor).status, AttendStatus::kOk);
    runs = std::move(sink.runs);
    output.assign(result.data(), result.data() + result.size());
  }
  std::vector<SelectedRun> runs;
  std::vector<std::byte> output;
  std::vector<float> lse;
};

class CollectByItem final : public SelectionSink {
 public:
  void Take(std::uint32_t item, const SelectedRun& run) override {
    if (item >= runs.size()) runs.resize(item + 1);
    runs[item].push_back(run);
  }
  std::vector<std::vector<SelectedRun>> runs;
};

// With per-head selection, each query head selects and reads as if it were alone.
TEST_P(AttendSelection, HeadsMayChooseForThemselves) {
  int unlike = 0;
  for (int round = 0; round < subject().rounds(40) || (unlike == 0 && round < 1000); ++round) {
    const BatchShape shape = AnyBatch(random_);
    const Mixture mixture = AnyLane(shape, random_);
    SelectionRule rule = AnyRule(random_);
    rule.each_head = true;
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, static_cast<std::uint32_t>(random_.Between(1, 12)));
    batch.items()[0].selection = &rule;
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    const AttendBatch& all = batch.batch();
    const AttendItem& item = all.items[0];
    PerHeadItems items;
    items.Add(all, item);
    CollectByItem chosen;
    chosen.runs.resize(all.geometry.group());
    const AttendResult result = items.ForEachBatch(
        all,
        [&](const AttendBatch& apart) {
          EXPECT_EQ(apart.items.size(), all.geometry.group());
          InlineExecutor executor;
          EXPECT_EQ(subject().Choose(apart, executor, chosen).status, AttendStatus::kOk);
          return subject().Run(apart, executor);
        },
        [](const AttendResult& ran) { return ran.status == AttendStatus::kOk; });
    ASSERT_EQ(result.status, AttendStatus::kOk);
    EXPECT_EQ(result.implementation, subject().name());
    const std::size_t row = all.geometry.head_dim * ElementBytes(all.output_type);
    for (std::uint32_t h = 0; h < all.geometry.group(); ++h) {
      const std::uint32_t head = item.kv_head * all.geometry.group() + h;
      const OneHead expected(subject(), all, head);
      ASSERT_EQ(chosen.runs[h].size(), expected.runs.size());
      for (std::size_t i = 0; i < expected.runs.size(); ++i) {
        EXPECT_EQ(chosen.runs[h][i].segment, expected.runs[i].segment);
        EXPECT_EQ(chosen.runs[h][i].first_entry, expected.runs[i].first_entry);
        EXPECT_EQ(chosen.runs[h][i].entries, expected.runs[i].entries);
        unlike += chosen.runs[h][i].first_entry !=
                  chosen.runs[0][std::min(i, chosen.runs[0].size() - 1)].first_entry;
      }
      for (std::uint32_t q = 0; q < item.queries; ++q) {
        const std::size_t index = std::size_t{q} * all.geometry.query_heads + head;
        EXPECT_EQ(std::memcmp(static_cast<const std::byte*>(item.output) + index * row,
                              expected.output.data() + q * row, row),
                  0)
            << "query " << q << " of head " << head;
        EXPECT_EQ(std::memcmp(item.lse + index, &expected.lse[q], sizeof(float)), 0);
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(unlike, 0) << "no two heads ever chose differently";
}

// The score in logits of a block for a query row, by definition.
double ExactScore(const SegmentView& segment, const LayerGeometry& geometry, const Block& block,
                  const std::vector<double>& query) {
  const TileShape& shape = segment.shape;
  const std::byte* tile = segment.arena + segment.tile_offsets[block.first / kTileEntries];
  const std::uint32_t index = block.first % kTileEntries / shape.block;
  const std::byte* summaries =
      segment.summary_offsets == nullptr
          ? SummariesAfter(tile, LayoutOf(shape))
          : segment.arena + segment.summary_offsets[block.first / kTileEntries];
  const std::vector<double> row = ReadBlock(shape, summaries, index).elements;
  double score = 0;
  for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
    score += shape.summary == Summary::kMean
                 ? query[c] * row[c]
                 : std::max(query[c] * row[c], query[c] * row[shape.key.channels + c]);
  }
  score *= geometry.scale;
  double weight = shape.weights ? 0 : 1;
  for (std::uint32_t e = 0; shape.weights && e < block.entries; ++e) {
    float s;
    std::memcpy(&s, tile + LayoutOf(shape).weights + (block.first % kTileEntries + e) * sizeof s,
                sizeof s);
    weight = std::max<double>(weight, s);
  }
  return score + std::log(weight);
}

// The value of every block: the maximum over rows of score - log-sum-exp (or of score).
std::vector<double> ExactValues(TestBatch& batch, const std::vector<Block>& blocks) {
  const AttendBatch& all = batch.batch();
  const AttendItem& item = all.items[0];
  const LayerGeometry& geometry = all.geometry;
  std::vector<double> values(blocks.size(), -std::numeric_limits<double>::infinity());
  for (std::uint32_t r = 0; r < item.queries * geometry.query_heads; ++r) {
    std::vector<double> row(geometry.head_dim);
    for (std::uint32_t c = 0; c < geometry.head_dim; ++c) {
      row[c] = OutputElement(geometry.type,
                             static_cast<const std::byte*>(item.query) +
                                 std::size_t{r} * geometry.head_dim * ElementBytes(geometry.type),
                             c);
    }
    std::vector<double> scores(blocks.size());
    double sum = 0;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const SegmentView& segment = item.lane->segments[blocks[b].segment];
      const std::vector<double> query =
          segment.shape.packed() ? RotateExactly(segment.rotation.key, segment.rotation.type,
                                                 segment.shape.key.channels, row)
                                 : row;
      scores[b] = ExactScore(segment, geometry, blocks[b], query);
      if (blocks[b].visible != 0) sum += std::exp(scores[b]);
    }
    const bool by_share = item.selection->judge == SelectionRule::Judge::kShare;
    const double lse = by_share && sum > 0 ? std::log(sum) : 0;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      values[b] = std::max(values[b], scores[b] - lse);
    }
  }
  return values;
}

TEST_P(AttendSelection, TakesTheBest) {
  for (int round = 0; round < subject().rounds(40); ++round) {
    BatchShape shape = AnyBatch(random_);
    shape.geometry.sliding_window = 0;  // every query sees every block
    const Mixture mixture = AnyLane(shape, random_);
    const SelectionRule rule = AnyRule(random_);
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, 1);
    batch.items()[0].selection = &rule;
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    const std::vector<SelectedRun> runs = Choose(subject(), batch);
    const auto [begin, end] = VisibleRange(batch.batch());
    const std::vector<Block> blocks = BlocksOfLane(mixture.lane->view(), begin, end, runs);
    const std::vector<double> values = ExactValues(batch, blocks);
    double worst_taken = std::numeric_limits<double>::infinity();
    double best_left = -worst_taken;
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      const bool may_be_forced = b == 0 || b + 1 == blocks.size();
      if (blocks[b].taken && !may_be_forced) worst_taken = std::min(worst_taken, values[b]);
      if (!blocks[b].taken && blocks[b].visible != 0) best_left = std::max(best_left, values[b]);
    }
    EXPECT_GE(worst_taken, best_left - subject().value_tolerance());
    if (HasFailure()) return;
  }
}

}  // namespace

}  // namespace tessera::kernels
