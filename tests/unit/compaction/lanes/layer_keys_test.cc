// Keys as token policies use them, in any stored form, on the device that computes.

#include "daemon/compaction/lanes/layer_keys.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/lanes/element.h"
#include "daemon/compaction/lanes/rope_shift.h"
#include "daemon/compaction/observation/lane_entries.h"
#include "daemon/policies/grammar/parse.h"
#include "kernels/format/error_bound.h"
#include "tests/contract/attend/attend_batch.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/unit/compaction/test_node.h"

namespace tessera::compaction {
namespace {

class LayerKeysTest : public testing::TestWithParam<DeviceKind> {
 protected:
  // By entry, as loaded: the product with a unit query is one element of the key.
  std::vector<std::vector<double>> Loaded(LayerKeys& keys, std::uint32_t lane,
                                          std::uint64_t count) {
    const kernels::DenseTile dense = node_.model().layout().tile(0);
    std::vector<std::vector<std::byte>> queries(dense.head_dim,
                                                std::vector<std::byte>(dense.row_bytes()));
    std::vector<std::vector<double>> products(dense.head_dim, std::vector<double>(count));
    std::vector<kernels::KeyObservation> looks;
    for (std::uint32_t d = 0; d < dense.head_dim; ++d) {
      SetElement(queries[d].data(), dense.type, d, 1);
      looks.push_back({.queries = {.rows = queries[d].data(), .count = 1},
                       .visible = kernels::FullRanges(1, count),
                       .logits = true,
                       .sums = products[d]});
    }
    EXPECT_TRUE(keys.Look(lane, looks).ok());
    std::vector<std::vector<double>> loaded(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      for (const std::vector<double>& of_dim : products) loaded[i].push_back(of_dim[i]);
    }
    return loaded;
  }
  // K of every entry, lane by lane, as readers see it.
  std::vector<std::vector<std::vector<double>>> ShownKeys(const cache::Sequence& sequence) {
    const auto view = cache::ReadSequence(node_.world().tenant(), sequence);
    EXPECT_TRUE(view.ok()) << view.status();
    std::vector<std::vector<std::vector<double>>> keys;
    for (const cache::SequenceView::LaneOf& lane : view->lanes) {
      const kernels::LayerGeometry& geometry = sequence.model().geometry(lane.layer);
      const kernels::LaneView shown = {.segments = &view->segments[lane.first_segment],
                                       .segment_count = lane.resolved.segments,
                                       .tail = {}};
      const kernels::ExactLane exact(shown, geometry);
      keys.emplace_back();
      for (const kernels::ExactLane::Entry& entry : exact.entries()) {
        keys.back().emplace_back(entry.key, entry.key + geometry.head_dim);
      }
    }
    return keys;
  }
  void Append(cache::Sequence& sequence, std::uint64_t tokens) {
    const std::vector<std::uint64_t> more = cache::NewStamps(tokens);
    stamps_.insert(stamps_.end(), more.begin(), more.end());
    const cache::StampedRows rows(sequence.model().layout(), stamps_);
    const auto held = sequence.Append({.first_layer = 0,
                                       .layers = sequence.model().layers(),
                                       .first_token = stamps_.size() - tokens,
                                       .tokens = tokens},
                                      rows);
    ASSERT_TRUE(held.ok()) << held.status();
  }
  void RunAll() {
    while (scheduler_.RunNext().has_value()) {
    }
  }
  void Compress(const std::shared_ptr<cache::Sequence>& sequence) {
    compactor_.Compress(sequence, {0, 1, true},
                        [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
    RunAll();
  }
  static LayerKeys::Options OptionsFor(cache::Sequence& sequence) {
    return {.device = sequence.memory().device, .geometry = sequence.model().geometry(0)};
  }

  TestRandom random_;
  TestNode node_{GetParam()};
  std::vector<std::uint64_t> stamps_;
  ManualScheduler scheduler_;
  Logger logger_{{.level = LogLevel::kError}};
  Compactor compactor_{{.scheduler = &scheduler_,
                        .logger = &logger_,
                        .clock = &node_.world().clock(),
                        .operations = &kernels::OperationsOf(kernels::BestImplementation())}};
};

// A sealed segment, a provisional one with raw rows, and dense rows.
TEST_P(LayerKeysTest, AreRowsAsTheyCameOrWhatWasKeptOfThem) {
  const kernels::ElementType types[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                        kernels::ElementType::kFp32};
  const auto sequence = node_.NewSequence(cache::SmallModel("m", 1, 2, random_.Pick(types)));
  policies::Policy policy;
  policy.mosaic.emplace();
  policy.mosaic->strategy.kept = {0.5};
  policy.mosaic->strategy.groups = {1};
  policy.mosaic->strategy.threshold = {.key = 1, .value = 1};
  policy.mosaic->segments = {
      .tokens = 512, .min_tokens = 64, .sinks = 0, .recent = 0, .loss_window = 64};
  ASSERT_TRUE(compactor_.SetPolicy(*sequence, policy).ok());
  ASSERT_NO_FATAL_FAILURE(Append(*sequence, 100));
  Compress(sequence);
  const auto sealed = ShownKeys(*sequence);
  ASSERT_NO_FATAL_FAILURE(Append(*sequence, 70));
  const auto appended = ShownKeys(*sequence);
  compactor_.TailsMoved(sequence);
  RunAll();
  auto runs = sequence->LookAt(0, /*whole=*/true);
  ASSERT_TRUE(runs.ok()) << runs.status();
  ASSERT_EQ((*runs)[0].settled_entries(), 100u);
  ASSERT_EQ((*runs)[0].provisional_entries(), 64u);
  ASSERT_EQ((*runs)[0].plain_entries(), 6u);
  // Others may append meanwhile.
  ASSERT_NO_FATAL_FAILURE(Append(*sequence, 600));
  const LaneEntryList seen((*runs)[1]);
  ASSERT_EQ(seen.view().count, 170u);
  EXPECT_TRUE(seen.view().weights.empty());
  for (std::uint64_t i = 0; i < 170; ++i) EXPECT_EQ(seen.view().positions[i], i);

  LayerKeys keys(OptionsFor(*sequence), *std::move(runs));
  const kernels::Rounding rounding = kernels::RoundingOf(sequence->model().geometry(0).type);
  for (std::uint32_t lane = 0; lane < 2; ++lane) {
    const auto loaded = Loaded(keys, lane, 170);
    for (std::size_t i = 0; i < 100; ++i) {
      for (std::size_t d = 0; d < 64; ++d) {
        EXPECT_NEAR(loaded[i][d], sealed[lane][i][d],
                    1.01 * rounding.relative * std::fabs(sealed[lane][i][d]) + 1e-4)
            << "entry " << i;
      }
    }
    for (std::size_t i = 100; i < 170; ++i) EXPECT_EQ(loaded[i], appended[lane][i]) << i;
  }
}

// With room for only one lane, or a small limit of loaded bytes, lanes are loaded in turn. Without
// any room there is an error.
TEST_P(LayerKeysTest, LanesTakeTurnsWhereThereIsNoRoomForAll) {
  const auto sequence = node_.NewSequence(cache::SmallModel("m", 1, 3));
  ASSERT_NO_FATAL_FAILURE(Append(*sequence, 50));
  const auto expected = ShownKeys(*sequence);
  LayerKeys::Options small = OptionsFor(*sequence);
  small.most_bytes = 1;
  const struct {
    int room;
    LayerKeys::Options options;
    std::uint64_t loads;
  } cases[] = {{3, OptionsFor(*sequence), 3},
               {2, OptionsFor(*sequence), 4},
               {1, OptionsFor(*sequence), 4},
               {3, small, 4}};
  for (const auto& [room, options, loads] : cases) {
    node_.device().set_most_lanes(room);
    auto runs = sequence->LookAt(0, /*whole=*/true);
    ASSERT_TRUE(runs.ok()) << runs.status();
    const std::uint64_t before = node_.device().loads();
    LayerKeys keys(options, *std::move(runs));
    EXPECT_EQ(node_.device().loads(), before) << "nobody has asked";
    for (const std::uint32_t lane : {2u, 0u, 0u, 1u, 2u}) {
      EXPECT_EQ(Loaded(keys, lane, 50), expected[lane]);
      std::vector<double> lengths(50);
      ASSERT_TRUE(keys.AddSquaredLengths(lane, lengths).ok());
      for (std::size_t i = 0; i < 50; ++i) {
        const std::vector<double>& key = expected[lane][i];
        const double length = std::inner_product(key.begin(), key.end(), key.begin(), 0.0);
        EXPECT_NEAR(lengths[i], length, 1e-5 * (1 + length));
      }
    }
    EXPECT_EQ(node_.device().loads() - before, loads);
  }
  node_.device().set_most_lanes(0);
  auto runs = sequence->LookAt(0, /*whole=*/true);
  LayerKeys keys(OptionsFor(*sequence), *std::move(runs));
  const absl::Status status = keys.Look(0, {});
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

// Keys of three kinds before rotation to their positions, far apart and close together.
class TurnedRows final : public cache::MadeRows {
 public:
  static constexpr std::uint64_t kKinds = 3;

  explicit TurnedRows(const cache::Model& model) : MadeRows(model.layout()), spec_(model.spec()) {}

  // A key of this kind, as stored at a position.
  std::vector<std::byte> Key(std::uint64_t kind, std::uint64_t position) const {
    const kernels::DenseTile tile = layout_.tile(0);
    std::vector<std::byte> row(tile.row_bytes());
    std::mt19937_64 random(1 + kind);
    std::normal_distribution<float> normal;
    for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
      SetElement(row.data(), tile.type, d, normal(random));
    }
    RopeShift(spec_.rope(), tile).Turn(row.data(), static_cast<std::int64_t>(position));
    return row;
  }
  void Make(std::uint32_t, std::uint32_t, std::uint64_t first, std::uint32_t count, std::byte* key,
            std::byte* value) const override {
    const kernels::DenseTile tile = layout_.tile(0);
    std::memset(value, 0, count * tile.row_bytes());
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::vector<std::byte> row = Key((first + i) % kKinds, first + i);
      std::memcpy(key + i * tile.row_bytes(), row.data(), row.size());
    }
  }

 private:
  const cache::ModelSpec& spec_;
};

// As stored, hardly any keys are similar. Rotated back, all keys of a kind are equal and merge at
// the position of the first.
TEST_P(LayerKeysTest, KeysThatAreTurnedBackAreAlikeWhereverTheyStand) {
  constexpr std::uint64_t kTokens = 90;
  const kernels::ElementType types[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                        kernels::ElementType::kFp32};
  cache::ModelSpec spec = cache::SmallModel("m", 1, 2, random_.Pick(types));
  spec.rope_theta = 10000;
  spec.rope_interleaved = random_.OneIn(2);
  const auto sequence = node_.NewSequence(spec);
  const TurnedRows rows(sequence->model());
  ASSERT_TRUE(sequence->Append({.layers = 1, .tokens = kTokens}, rows).ok());
  const auto compress = [&](std::string_view key_space) {
    const auto policy = policies::ParsePolicy(
        Concat("semanticache:tau=0.98,sink=0,recent=0,delimiters=0,key_space=", key_space));
    ASSERT_TRUE(policy.ok()) << policy.status();
    ASSERT_TRUE(compactor_.SetPolicy(*sequence, *policy).ok());
    Compress(sequence);
  };
  ASSERT_NO_FATAL_FAILURE(compress("post"));
  const auto entries = [&] { return sequence->Describe(cache::Sequence::Detail::kEntries).lanes; };
  EXPECT_EQ(entries().front().entries, kTokens);
  ASSERT_NO_FATAL_FAILURE(compress("pre"));
  const auto shown = ShownKeys(*sequence);
  for (std::uint32_t lane = 0; lane < 2; ++lane) {
    const cache::Sequence::LaneDescription left = entries()[lane];
    EXPECT_THAT(left.positions, testing::ElementsAre(0, 1, 2));
    EXPECT_THAT(left.weights, testing::Each(kTokens / TurnedRows::kKinds));
    ASSERT_EQ(shown[lane].size(), TurnedRows::kKinds);
    for (std::uint64_t kind = 0; kind < TurnedRows::kKinds; ++kind) {
      const std::vector<std::byte> key = rows.Key(kind, kind);
      for (std::uint32_t d = 0; d < 64; ++d) {
        EXPECT_NEAR(shown[lane][kind][d], ElementAt(key.data(), spec.type, d), 0.02) << d;
      }
    }
  }
}

// Channels are weighed on the stored rows, whatever rotation is used to compare keys.
TEST_P(LayerKeysTest, ChannelsAreWeighedAsTheyAreStored) {
  constexpr std::uint64_t kTokens = 50;
  cache::ModelSpec spec = cache::SmallModel("m", 1, 2, kernels::ElementType::kFp32);
  spec.rope_theta = 10000;
  const auto sequence = node_.NewSequence(spec);
  const TurnedRows rows(sequence->model());
  ASSERT_TRUE(sequence->Append({.layers = 1, .tokens = kTokens}, rows).ok());
  const auto stored = ShownKeys(*sequence);
  LayerKeys::Options options = OptionsFor(*sequence);
  options.turner.emplace(sequence->model().spec().rope(), sequence->model().layout().tile(0));
  auto runs = sequence->LookAt(0, /*whole=*/true);
  ASSERT_TRUE(runs.ok()) << runs.status();
  LayerKeys keys(options, *std::move(runs));
  for (std::uint32_t lane = 0; lane < 2; ++lane) {
    const auto loaded = Loaded(keys, lane, kTokens);
    std::vector<double> squares(64);
    ASSERT_TRUE(keys.AddChannelSquares(lane, kTokens, squares).ok());
    for (std::uint32_t d = 0; d < 64; ++d) {
      double expected = 0;
      for (const std::vector<double>& key : stored[lane]) expected += key[d] * key[d];
      EXPECT_NEAR(squares[d], expected, 1e-5 * expected) << d;
      for (std::uint64_t i = 0; i < kTokens; ++i) {
        const std::vector<std::byte> key = rows.Key(i % TurnedRows::kKinds, 0);
        EXPECT_NEAR(loaded[i][d], ElementAt(key.data(), spec.type, d), 1e-4) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, LayerKeysTest,
                         testing::Values(DeviceKind::kCpu, DeviceKind::kGpu),
                         [](const testing::TestParamInfo<DeviceKind>& kind) {
                           return kind.param == DeviceKind::kCpu ? "Cpu" : "Gpu";
                         });

}  // namespace
}  // namespace tessera::compaction
