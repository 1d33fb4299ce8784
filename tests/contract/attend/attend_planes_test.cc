// Attention over lanes with planes beside dense and packed segments, and the choice of quads by
// signs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "kernels/dispatch/implementation.h"
#include "kernels/dispatch/per_head.h"
#include "kernels/reference/planes.h"
#include "tests/contract/attend/attend_conformance.h"
#include "tests/contract/attend/attend_packed_cases.h"

namespace tessera::kernels {
namespace {

constexpr PlaneWidths kKeyWidths[] = {{6, 4}, {4, 2}, {8, 8}, {4, 0}, {6, 6}, {2, 2}};
constexpr PlaneWidths kValueWidths[] = {{4, 0}, {4, 2}, {8, 0}, {6, 4}, {2, 0}};

// Segments of planes that share a few books, among dense and packed ones; then a dense tail.
struct PlanesMixture {
  PlanesMixture(const BatchShape& batch, std::uint32_t segments, std::uint32_t most_entries,
                std::uint32_t tail, TestRandom& random) {
    const std::uint32_t dim = batch.geometry.head_dim;
    std::vector<SegmentPlan> plan;
    std::uint32_t count = tail;
    for (std::uint32_t s = 0; s < segments; ++s) {
      if (strategies.empty() || !random.OneIn(2)) AddStrategy(batch, random);
      plan.push_back({.strategy = &strategies[random.Below(strategies.size())],
                      .entries = static_cast<std::uint32_t>(random.Below(most_entries))});
      count += plan.back().entries;
    }
    rows = std::make_unique<SourceRows>(dim, batch.geometry.type, count, Values::kNormal, random);
    lane = std::make_unique<PackedLane>(*rows, 0, plan, tail, random.Below(1000), random);
  }

  void AddStrategy(const BatchShape& batch, TestRandom& random) {
    const std::uint32_t dim = batch.geometry.head_dim;
    TileShape shape = DenseShape(dim, batch.geometry.type);
    if (random.OneIn(5)) {
      shape = AnySegmentShape(batch, {.cut = true}, random);
      if (shape.summary != Summary::kNone) shape.summary = Summary::kMean;
    } else if (!random.OneIn(4)) {
      shape = PlanesShape(dim, random.Pick(kKeyWidths), random.Pick(kValueWidths));
      shape.weights = random.OneIn(2);
      shape.positions = random.OneIn(2);
    }
    if ((shape.planes() && shape.key_planes.planes() == 2) || !shape.packed()) {
      if (random.OneIn(2)) shape = WithSigns(shape);
    }
    strategies.push_back(AnyStrategy(shape, random));
  }

  std::string Describe() const {
    std::string text;
    for (const Strategy& strategy : strategies) text += "\n  " + kernels::Describe(strategy.shape);
    return text;
  }

  std::deque<Strategy> strategies;
  std::unique_ptr<SourceRows> rows;
  std::unique_ptr<PackedLane> lane;
};

TEST_P(AttendPlanes, Mixtures) {
  for (int round = 0; round < subject().rounds(60); ++round) {
    const BatchShape shape = AnyBatch(random_);
    const PlanesMixture mixture(shape, static_cast<std::uint32_t>(random_.Between(1, 6)),
                                random_.OneIn(3) ? 200 : 40,
                                static_cast<std::uint32_t>(random_.Below(70)), random_);
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, static_cast<std::uint32_t>(random_.Between(1, 12)));
    const std::uint64_t anywhere = mixture.lane->end_position();
    batch.AddViews({&mixture.lane->view()}, 3,
                   anywhere - random_.Below(std::min<std::uint64_t>(anywhere, 300) + 1));
    RunAndJudge(batch);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendPlanes, SeveralParts) {
  const BatchShape shape = AnyBatch(64, AnyElementType(random_), 2, random_);
  for (int round = 0; round < subject().rounds(3); ++round) {
    const PlanesMixture mixture(shape, 3, 4200, 5, random_);
    SCOPED_TRACE(Describe(shape) + mixture.Describe());
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, 2);
    RunAndJudge(batch);
    if (HasFatalFailure()) return;
  }
}

// The bits depend on the lane and the query only.
TEST_P(AttendPlanes, SameBitsOnEveryExecutorAndSplit) {
  for (int round = 0; round < subject().rounds(10); ++round) {
    const BatchShape shape = AnyBatch(random_);
    const PlanesMixture a(shape, 4, 300, 30, random_);
    const PlanesMixture b(shape, 2, 100, 3, random_);
    SCOPED_TRACE(Describe(shape) + a.Describe() + b.Describe());
    TestBatch batch(shape, random_);
    AddNewest(batch, *a.lane, 3);
    AddNewest(batch, *b.lane, 7);
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    const std::vector<std::byte> expected = batch.OutputBytes();
    batch.ExpectSameBitsOnExecutors(subject(), expected);
    batch.ExpectSameBitsItemByItem(subject(), expected);
    if (subject().rows_are_independent()) batch.ExpectSameBitsQueryByQuery(subject(), expected);
    if (HasFatalFailure()) return;
  }
}

// Planes without a whole book, and signs without the keys' side of one, are refused.
TEST_P(AttendPlanes, MissingBooksAreRefused) {
  const BatchShape shape = AnyBatch(64, ElementType::kBf16, 1, random_);
  for (const TileShape& tile :
       {PlanesShape(64, {6, 4}, {4, 0}), WithSigns(DenseShape(64, ElementType::kBf16))}) {
    const Strategy strategy = AnyStrategy(tile, random_);
    const SourceRows rows(64, ElementType::kBf16, 40, Values::kNormal, random_);
    PackedLane lane(rows, 0, {{&strategy, 40}}, 0, 0, random_);
    TestBatch batch(shape, random_);
    AddNewest(batch, lane, 1);
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    const RotationView book = lane.segment(0).rotation;
    const auto expect_refused = [&](RotationView view) {
      lane.segment(0).rotation = view;
      ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kBadTile);
    };
    RotationView view = book;
    view.key_mean = nullptr;
    expect_refused(view);
    view = book;
    view.key = nullptr;
    expect_refused(view);
    view = book;
    view.type = ElementType::kFp32;
    expect_refused(view);
    if (!tile.planes()) continue;
    view = book;
    view.value = view.value_mean = nullptr;
    expect_refused(view);
  }
}

// ---- signs ----

// The quads that items take, of lanes with one segment.
class CollectQuads final : public SelectionSink {
 public:
  explicit CollectQuads(std::size_t items) : quads(items) {}
  void Take(std::uint32_t item, const SelectedRun& run) override {
    for (std::uint32_t e = 0; e < run.entries; e += kQuadRows) {
      quads[item].push_back(run.first_entry / kQuadRows + e / kQuadRows);
    }
  }
  std::vector<std::vector<std::uint32_t>> quads;
};

// A lane of one segment with signs, then a tail.
class SignLane {
 public:
  SignLane(const BatchShape& batch, bool planes, std::uint32_t entries, TestRandom& random)
      : entries_(entries),
        rows_(batch.geometry.head_dim, batch.geometry.type, entries + kTail, Values::kNormal,
              random),
        strategy_(AnyStrategy(AnyShape(batch, planes, random), random)) {
    std::fill(rows_.weights.begin(), rows_.weights.end(), 1.0f);
    std::fill(rows_.gaps.begin(), rows_.gaps.end(), 1u);
    lane = &Add(random);
  }
  std::string Describe() const { return kernels::Describe(lane->segment(0).shape); }

  // The value of every quad for the rows of an item, by the reference.
  std::vector<double> Values(const LayerGeometry& geometry, const AttendItem& item, bool by_share) {
    std::vector<double> values((entries_ + kQuadRows - 1) / kQuadRows, -HUGE_VAL);
    for (std::uint32_t r = 0; r < item.queries * geometry.group(); ++r) {
      const std::size_t row = std::size_t{r / geometry.group()} * geometry.query_heads +
                              item.kv_head * geometry.group() + r % geometry.group();
      const std::vector<double> scores =
          Scores(static_cast<const std::byte*>(item.query) +
                     row * geometry.head_dim * ElementBytes(geometry.type),
                 geometry.type);
      double sum = 0;
      for (double score : scores) sum += std::exp(score);
      for (std::size_t q = 0; q < values.size(); ++q) {
        values[q] = std::max(values[q], scores[q] - (by_share ? std::log(sum) : 0));
      }
    }
    return values;
  }

  // A lane of the same entries, with weight 0 for those of quads that are not in the list.
  const LaneView& Only(const std::vector<std::uint32_t>& quads, TestRandom& random) {
    strategy_.shape.weights = true;
    PackedLane& other = Add(random);
    const TileLayout layout = LayoutOf(strategy_.shape);
    for (std::uint32_t e = 0; e < entries_; ++e) {
      if (std::binary_search(quads.begin(), quads.end(), e / kQuadRows)) continue;
      std::memset(other.arena() + other.offsets(0)[e / kTileEntries] + layout.weights +
                      e % kTileEntries * sizeof(float),
                  0, sizeof(float));
    }
    return other.view();
  }

  PackedLane* lane;

 private:
  static constexpr std::uint32_t kTail = 20;

  static TileShape AnyShape(const BatchShape& batch, bool planes, TestRandom& random) {
    const std::uint32_t dim = batch.geometry.head_dim;
    TileShape shape = DenseShape(dim, batch.geometry.type);
    if (planes) {
      shape = random.OneIn(3) ? PlanesShape(dim, {8, 2}, {4, 2}) : PlanesShape(dim, {6, 4}, {4, 0});
    }
    shape.weights = random.OneIn(3);
    shape.positions = random.OneIn(3);
    return WithSigns(shape);
  }
  PackedLane& Add(TestRandom& random) {
    return lanes_.emplace_back(rows_, 0, std::vector<SegmentPlan>{{&strategy_, entries_}}, kTail, 0,
                               random);
  }

  // The score of every quad for one query row.
  std::vector<double> Scores(const std::byte* query, ElementType type) {
    const SegmentView& segment = lane->segment(0);
    const std::uint32_t dim = segment.shape.head_dim;
    const TileLayout layout = LayoutOf(segment.shape);
    const ScorePart part = {.runs = nullptr,
                            .run_count = 0,
                            .rows = nullptr,
                            .row_count = 0,
                            .shape = segment.shape,
                            .layout = layout,
                            .padded_channels = dim,
                            .scale = 1,
                            .scores = nullptr,
                            .score_stride = 0};
    std::vector<float> rotated(dim);
    OperationsOf(*FindImplementation("reference"))
        .rotate({.rotation = segment.rotation.key,
                 .rotation_type = ElementType::kBf16,
                 .channels = dim,
                 .head_dim = dim,
                 .rows = &query,
                 .row_type = type,
                 .row_count = 1,
                 .output = rotated.data(),
                 .padded_channels = dim});
    std::vector<double> scores((entries_ + kQuadRows - 1) / kQuadRows);
    for (std::uint32_t q = 0; q < scores.size(); ++q) {
      const std::uint32_t tile = q / kTileQuads;
      const std::byte* summaries =
          lane->arena() + (lane->summary_offsets(0).empty() ? lane->offsets(0)[tile] + layout.bytes
                                                            : lane->summary_offsets(0)[tile]);
      scores[q] = SignScore(part, rotated.data(), summaries, q % kTileQuads,
                            std::min(kQuadRows, entries_ - q * kQuadRows));
    }
    return scores;
  }

  std::uint32_t entries_;
  SourceRows rows_;
  Strategy strategy_;
  std::deque<PackedLane> lanes_;  // the lane, then what Only returned
};

// The quads with the best values for the rows of an item are read, and nothing else of the segment.
// Queries share a choice, or are items of their own.
TEST_P(AttendPlanes, SignsChooseTheBestQuads) {
  // An implementation may round a code of the query the other way. Norms are below 2.
  constexpr double kOneCode = 2.0 / 127;
  for (int round = 0; round < subject().rounds(30); ++round) {
    BatchShape shape = AnyBatch(random_);
    shape.geometry.sliding_window = 0;
    const auto entries =
        static_cast<std::uint32_t>(random_.Between(1, random_.OneIn(4) ? 3000 : 300));
    SignLane signs(shape, random_.OneIn(2), entries, random_);
    SCOPED_TRACE(Describe(shape) + " " + signs.Describe() + " entries " + std::to_string(entries));
    SelectionRule rule = {.rate = 0.2, .judge = SelectionRule::Judge::kLogit};
    if (random_.OneIn(3)) rule.floor = random_.Below(400);
    if (random_.OneIn(4)) rule.judge = SelectionRule::Judge::kShare;
    const bool by_share = rule.judge == SelectionRule::Judge::kShare;
    TestBatch batch(shape, random_);
    AddNewest(batch, *signs.lane, static_cast<std::uint32_t>(random_.Between(1, 5)));
    if (random_.OneIn(2)) batch.SplitIntoQueries();
    std::vector<AttendItem>& items = batch.items();
    for (AttendItem& item : items) item.selection = &rule;
    CollectQuads chosen(items.size());
    InlineExecutor executor;
    ASSERT_EQ(subject().Choose(batch.batch(), executor, chosen).status, AttendStatus::kOk);

    const auto budget = std::max<std::uint64_t>(
        static_cast<std::uint64_t>(std::ceil(0.2 * entries - 1e-6)), rule.floor);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const std::vector<double> values = signs.Values(shape.geometry, items[i], by_share);
      std::uint64_t taken = 0;
      double least = HUGE_VAL;
      for (std::uint32_t q : chosen.quads[i]) {
        taken += std::min(kQuadRows, entries - q * kQuadRows);
        // A partial last quad is always read.
        if ((q + 1) * kQuadRows <= entries) least = std::min(least, values[q]);
      }
      ASSERT_GE(taken, std::min<std::uint64_t>(budget, entries));
      ASSERT_LT(taken, budget + kQuadRows);
      for (std::uint32_t q = 0; q < values.size(); ++q) {
        if (std::binary_search(chosen.quads[i].begin(), chosen.quads[i].end(), q)) continue;
        ASSERT_LE(values[q], least + kOneCode)
            << "item " << i << ": quad " << q << " of " << values.size() << " was not taken";
      }
    }
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    for (std::size_t i = 0; i < items.size(); ++i) {
      items[i].lane = &signs.Only(chosen.quads[i], random_);
    }
    batch.Judge(subject(), random_);
    if (HasFatalFailure()) return;
  }
}

// With per-query selection, each query chooses and reads as if it were an item of its own.
TEST_P(AttendPlanes, QueriesMayChooseForThemselves) {
  for (int round = 0; round < subject().rounds(20); ++round) {
    const BatchShape shape = AnyBatch(random_);
    SignLane signs(shape, random_.OneIn(2), static_cast<std::uint32_t>(random_.Between(60, 400)),
                   random_);
    const SelectionRule shared = {.rate = 0.2, .judge = SelectionRule::Judge::kLogit};
    SelectionRule rule = shared;
    rule.each_query = true;
    TestBatch batch(shape, random_);
    AddNewest(batch, *signs.lane, static_cast<std::uint32_t>(random_.Between(2, 12)));
    batch.items()[0].selection = &rule;
    const AttendBatch& all = batch.batch();
    const AttendItem& item = all.items[0];
    InlineExecutor executor;
    EXPECT_EQ(subject().Run(all, executor).status, AttendStatus::kBadTile) << "was not split";
    PerHeadItems items;
    items.Add(all, item);
    const AttendResult result = items.ForEachBatch(
        all, [&](const AttendBatch& apart) { return subject().Run(apart, executor); },
        [](const AttendResult& ran) { return ran.status == AttendStatus::kOk; });
    ASSERT_EQ(result.status, AttendStatus::kOk);
    const LayerGeometry& geometry = all.geometry;
    const std::size_t query_row = geometry.head_dim * ElementBytes(geometry.type);
    const std::size_t row = geometry.head_dim * ElementBytes(all.output_type);
    for (std::uint32_t q = 0; q < item.queries; ++q) {
      Buffer output(geometry.query_heads * row);
      std::vector<float> lse(geometry.query_heads);
      AttendItem alone = item;
      alone.queries = 1;
      alone.first_query_position += q;
      alone.query =
          static_cast<const std::byte*>(item.query) + q * geometry.query_heads * query_row;
      alone.output = output.data();
      alone.lse = lse.data();
      alone.selection = &shared;
      AttendBatch one = all;
      one.items = {&alone, 1};
      ASSERT_EQ(subject().Run(one, executor).status, AttendStatus::kOk);
      for (std::uint32_t h = 0; h < geometry.group(); ++h) {
        const std::uint32_t head = item.kv_head * geometry.group() + h;
        const std::size_t index = std::size_t{q} * geometry.query_heads + head;
        EXPECT_EQ(std::memcmp(static_cast<const std::byte*>(item.output) + index * row,
                              output.data() + head * row, row),
                  0)
            << "query " << q << " of head " << head;
        EXPECT_EQ(std::memcmp(item.lse + index, &lse[head], sizeof(float)), 0);
      }
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace tessera::kernels
