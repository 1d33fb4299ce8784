// Keys as token policies look at them, where the device computes: the same choices on every device,
// and no key on the host of one that has memory of its own.

#include "daemon/compaction/layer_keys.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/compaction/compactor.h"
#include "daemon/compaction/element.h"
#include "daemon/compaction/layer_chooser.h"
#include "daemon/compaction/seen_entries.h"
#include "daemon/device/cuda_device.h"
#include "daemon/policies/parse.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/format/error_bound.h"
#include "tests/contract/attend_batch.h"
#include "tests/fakes/emulated_runtime.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/fakes/shared_gpu.h"
#include "tests/fakes/watched_device.h"
#include "tests/unit/cache/packed.h"

namespace tessera::compaction {
namespace {

using testing::HasSubstr;

enum class Kind { kCpu, kGpu };

// A node on one kind of device, and what is asked of that.
class TestNode {
 public:
  explicit TestNode(Kind kind)
      : device_(Open(kind)),
        watched_(*device_),
        world_({.ring_tiles = 4, .device = &watched_, .pool_extent_bytes = std::uint64_t{2} << 20}),
        worker_(std::in_place, world_.tenant(), world_.OpenSession()) {}
  ~TestNode() {
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_.ExpectBaseline();
  }

  tests::WatchedDevice& device() { return watched_; }
  cache::World& world() { return world_; }
  std::shared_ptr<cache::Sequence> NewSequence(const cache::ModelSpec& spec) {
    model_ = world_.Register(spec);
    return world_.NewSequence(worker_->session(), *model_);
  }
  const cache::Model& model() const { return *model_; }

 private:
  std::unique_ptr<device::Device> Open(Kind kind) {
    if (kind == Kind::kCpu) {
      return std::make_unique<device::CpuDevice>(kernels::BestImplementation());
    }
    auto gpu = device::CudaDevice::Create({.calls = &memory_, .gpus = &gpus_, .ordinal = 0});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *std::move(gpu);
  }

  tests::SharedGpu memory_;
  tests::EmulatedGpus gpus_;
  const std::unique_ptr<device::Device> device_;
  tests::WatchedDevice watched_;
  cache::World world_;
  std::optional<cache::TestWorker> worker_;
  std::shared_ptr<const cache::Model> model_;
};

// ---- keys, whatever their form

class LayerKeysTest : public testing::TestWithParam<Kind> {
 protected:
  // By entry, as they were loaded: what a query of one 1 makes of a key is its element.
  std::vector<std::vector<double>> Loaded(LayerKeys& keys, std::uint32_t lane,
                                          std::uint64_t count) {
    const kernels::DenseTile dense = node_.model().layout().tile(0);
    std::vector<std::vector<std::byte>> queries(dense.head_dim,
                                                std::vector<std::byte>(dense.row_bytes()));
    std::vector<std::vector<double>> products(dense.head_dim, std::vector<double>(count));
    std::vector<kernels::KeyLook> looks;
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
  static LayerKeys::Options OptionsFor(cache::Sequence& sequence) {
    return {.device = sequence.memory().device, .geometry = sequence.model().geometry(0)};
  }

  TestRandom random_;
  TestNode node_{GetParam()};
  std::vector<std::uint64_t> stamps_;
};

// A sealed segment, a provisional one whose rows are still there as they came, and plain rows.
TEST_P(LayerKeysTest, AreRowsAsTheyCameOrWhatWasKeptOfThem) {
  ManualScheduler scheduler;
  Logger logger({.level = LogLevel::kError});
  Compactor compactor({.scheduler = &scheduler,
                       .logger = &logger,
                       .clock = &node_.world().clock(),
                       .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  const kernels::ElementType types[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                        kernels::ElementType::kFp32};
  const auto sequence = node_.NewSequence(cache::SmallModel("m", 1, 2, random_.Pick(types)));
  policies::Policy policy;
  policy.mosaic.emplace();
  policy.mosaic->strategy.kept = {0.5};
  policy.mosaic->strategy.groups = {1};
  policy.mosaic->strategy.threshold = {.key = 1, .value = 1};
  policy.mosaic->segments = {.tokens = 512, .min_tokens = 64, .loss_window = 64};
  ASSERT_TRUE(compactor.SetPolicy(*sequence, policy).ok());
  ASSERT_NO_FATAL_FAILURE(Append(*sequence, 100));
  compactor.Compress(sequence, {0, 1, true},
                     [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
  while (scheduler.RunNext().has_value()) {
  }
  const auto sealed = ShownKeys(*sequence);
  ASSERT_NO_FATAL_FAILURE(Append(*sequence, 70));
  const auto appended = ShownKeys(*sequence);
  compactor.TailsMoved(sequence);
  while (scheduler.RunNext().has_value()) {
  }
  auto runs = sequence->LookAt(0, /*whole=*/true);
  ASSERT_TRUE(runs.ok()) << runs.status();
  ASSERT_EQ((*runs)[0].settled_entries(), 100u);
  ASSERT_EQ((*runs)[0].provisional_entries(), 64u);
  ASSERT_EQ((*runs)[0].plain_entries(), 6u);
  // Others may go on appending while it is looked at.
  ASSERT_NO_FATAL_FAILURE(Append(*sequence, 600));
  const SeenEntries seen((*runs)[1]);
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

// Where there is room for one lane only, or so few bytes may be loaded, they take turns; where
// there is none, that is said.
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

INSTANTIATE_TEST_SUITE_P(Devices, LayerKeysTest, testing::Values(Kind::kCpu, Kind::kGpu),
                         [](const testing::TestParamInfo<Kind>& kind) {
                           return kind.param == Kind::kCpu ? "Cpu" : "Gpu";
                         });

// ---- choices

// Keys that no rounding takes for another's. Of each token a grade of its own, in steps that every
// query tells apart by some percent: key 0 and 1 say it, in units of 16 and of 1. And one of a few
// directions, which outweighs the grade.
class GradedRows final : public cache::MadeRows {
 public:
  // `alike`: all lanes have one order, so that what is summed up over lanes has it, too.
  GradedRows(const shm::LaneLayout& layout, std::uint64_t seed, bool alike)
      : MadeRows(layout), seed_(seed), alike_(alike) {}

  // Of tokens in fours: the chunks are in random order, and what is in one stays together.
  std::uint64_t Grade(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t token) const {
    if (alike_) kv_head = 0;
    std::vector<std::uint64_t> order(kTokens / 4);
    std::iota(order.begin(), order.end(), 0u);
    std::mt19937_64 random(seed_ + 31 * layer + kv_head);
    std::shuffle(order.begin(), order.end(), random);
    return 4 * order[token / 4] + token % 4;
  }
  void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const kernels::DenseTile tile = layout_.tile(layer);
    std::memset(key, 0, count * tile.row_bytes());
    std::memset(value, 0, count * tile.row_bytes());
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t grade = Grade(layer, kv_head, first + i);
      std::byte* const row = key + i * tile.row_bytes();
      SetElement(row, tile.type, 0, static_cast<float>(grade / 16));
      SetElement(row, tile.type, 1, static_cast<float>(grade % 16));
      std::mt19937_64 random(seed_ + 7919 * (first + i));
      SetElement(row, tile.type, static_cast<std::uint32_t>(8 + random() % 5), 40);
    }
  }
  // A query whose product with a key is half its grade, so many times.
  static std::vector<std::byte> Query(const kernels::DenseTile& tile, float times) {
    std::vector<std::byte> row(tile.row_bytes());
    SetElement(row.data(), tile.type, 0, 8 * times);
    SetElement(row.data(), tile.type, 1, 0.5f * times);
    return row;
  }

  static constexpr std::uint64_t kTokens = 160;

 private:
  const std::uint64_t seed_;
  const bool alike_;
};

class ChoicesTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kPrompt = 120;
  static constexpr std::uint64_t kDecoded = 20;

  ChoicesTest() {
    const kernels::ElementType types[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                          kernels::ElementType::kFp32};
    spec_ = cache::SmallModel("graded", 2, 2, random_.Pick(types));
    spec_.delimiter_token_ids = {7};
  }

  struct Chosen {
    std::vector<policies::LayerDecision> decisions;  // the prompt's, and those that followed
    std::uint64_t reads = 0;
    std::uint64_t looks = 0;
  };

  // What the worker shows of tokens [first, end).
  void Show(const cache::Model& model, const policies::Policy& policy, const GradedRows& rows,
            std::uint64_t first, std::uint64_t end, LayerState& state) {
    const policies::Needs needs = policies::NeedsOf(policy);
    const kernels::LayerGeometry& geometry = model.geometry(kLayer);
    const kernels::DenseTile tile = model.layout().tile(kLayer);
    std::mt19937_64 drawn(query_seed_);
    const auto append = [&](std::uint64_t count, std::vector<std::byte>& to) {
      for (std::uint64_t i = 0; i < count * geometry.query_heads; ++i) {
        const std::vector<std::byte> row =
            GradedRows::Query(tile, static_cast<float>(1 + drawn() % 3));
        to.insert(to.end(), row.begin(), row.end());
      }
    };
    const bool decoded = first != 0;
    const double tokens = static_cast<double>(end);
    const auto up = [](double number) { return static_cast<std::uint64_t>(std::ceil(number)); };
    const std::uint64_t last =
        decoded ? end - first
                : std::max<std::uint64_t>(needs.last_queries, up(needs.last_share * tokens));
    ShownLayer shown = {.layer = kLayer, .tokens = end};
    std::vector<std::byte> last_rows;
    append(last, last_rows);
    shown.last = {end - last, last, last_rows.data()};
    const std::uint64_t norm = decoded ? 0 : up(needs.norm_share * tokens);
    std::vector<std::byte> norm_rows;
    append(norm, norm_rows);
    std::vector<std::uint64_t> positions;
    for (std::uint64_t i = 0; i < norm * geometry.query_heads; ++i) {
      positions.push_back(2 * (i % norm));
    }
    shown.norm = {norm, positions, norm_rows.data()};
    std::vector<float> sums;
    for (std::uint32_t head = 0; needs.attention_sums && !decoded && head < 2; ++head) {
      for (std::uint64_t t = 0; t < end; ++t) {
        sums.push_back(100.0f * static_cast<float>(rows.Grade(kLayer, head, t)));
      }
    }
    shown.sums = {0, sums.size() / 2, sums.data()};
    const absl::Status status = state.observation.Take(
        shown, needs, model, kernels::OperationsOf(kernels::BestImplementation()), budget_);
    EXPECT_TRUE(status.ok()) << status;
  }

  absl::StatusOr<Chosen> Choose(TestNode& node, const std::string& text) {
    const auto sequence = node.NewSequence(spec_);
    const GradedRows rows(node.model().layout(), row_seed_, text.starts_with("tova"));
    const absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    std::vector<policies::TextMark> marks(GradedRows::kTokens);
    for (std::size_t i = 0; i < marks.size(); i += 23) marks[i] = policies::TextMark::kDelimiter;
    const LayerChooser chooser({.sequence = sequence.get(), .policy = &*policy, .text = marks},
                               kLayer);
    LayerState state;
    Chosen chosen;
    const auto append = [&](std::uint64_t first, std::uint64_t count) {
      const auto held = sequence->Append(
          {.first_layer = 0, .layers = 2, .first_token = first, .tokens = count}, rows);
      EXPECT_TRUE(held.ok()) << held.status();
    };
    const auto choose = [&]() -> absl::Status {
      const std::uint64_t reads = node.device().reads();
      const std::uint64_t looks = node.device().looks();
      absl::StatusOr<LayerChoice> choice = chooser.Choose(state);
      if (!choice.ok()) return choice.status();
      chosen.reads += node.device().reads() - reads;
      chosen.looks += node.device().looks() - looks;
      chosen.decisions.push_back(choice->lanes);
      state.memory = choice->memory;
      state.decided_until = choice->until;
      return absl::OkStatus();
    };
    append(0, kPrompt);
    // Some of it in a form of its own that loses nothing.
    kernels::TileShape shape = kernels::DenseShape(64, spec_.type);
    shape.format = spec_.type == kernels::ElementType::kFp16 ? kernels::TileFormat::kPackedFp16
                                                             : kernels::TileFormat::kPackedBf16;
    if (packs_) {
      const auto packed = sequence->Pack({.shapes = {shape, shape}}, cache::Proceed);
      EXPECT_TRUE(packed.ok()) << packed.status();
    }
    Show(node.model(), *policy, rows, 0, kPrompt, state);
    absl::Status status = choose();
    if (status.ok() && policies::NeedsOf(*policy).decode_queries) {
      append(kPrompt, kDecoded);
      Show(node.model(), *policy, rows, kPrompt, kPrompt + kDecoded, state);
      status = choose();
    }
    EXPECT_TRUE(node.world().tenant().FreeSequence(sequence->id()).ok());
    if (!status.ok()) return status;
    return chosen;
  }

  static constexpr std::uint32_t kLayer = 1;
  TestRandom random_;
  const std::uint64_t row_seed_ = random_.Bits() >> 8;
  const std::uint64_t query_seed_ = random_.Bits() >> 8;
  pool::Account budget_{"test", 0};
  bool packs_ = false;
  cache::ModelSpec spec_;
  TestNode cpu_{Kind::kCpu};
  TestNode gpu_{Kind::kGpu};
};

TEST_F(ChoicesTest, AreTheSameOnAGpuAndNoKeyIsReadThere) {
  for (const bool packs : {false, true}) {
    packs_ = packs;
    for (const char* text :
         {"snapkv:tokens=40,window=8,kernel=1", "pyramidkv:tokens=50,window=8,kernel=1,beta=2",
          "chunkkv:tokens=40,window=8,chunk=4", "chunkkv:tokens=40,window=8,chunk=4,scope=head",
          "semantickv:sink=4,recent_ratio=0.05,keep_total=0.3,lambda=0.1,mask=none,norm=fixed",
          "semanticache:tau=0.5,sink=2,recent=4,max_chunk=32",
          "semanticache:tau=0.5,sink=2,recent=4,max_chunk=32,scope=layer",
          "semanticache:tau=0.5,sink=2,recent=4,max_chunk=32,delimiters=0", "tova:budget=120",
          "h2o:heavy=90,recent=30"}) {
      SCOPED_TRACE(Concat(text, packs ? ", packed" : ", plain"));
      // What was packed does not wait for a choice any more.
      if (packs && !policies::Continues(*policies::ParsePolicy(text)) &&
          !policies::Merges(*policies::ParsePolicy(text))) {
        continue;
      }
      const auto on_cpu = Choose(cpu_, text);
      const auto on_gpu = Choose(gpu_, text);
      ASSERT_TRUE(on_cpu.ok() && on_gpu.ok()) << on_cpu.status() << on_gpu.status();
      ASSERT_EQ(on_cpu->decisions.size(), on_gpu->decisions.size());
      bool all = true;
      for (std::size_t i = 0; i < on_cpu->decisions.size(); ++i) {
        for (std::size_t lane = 0; lane < 2; ++lane) {
          const policies::LaneDecision& expected = on_cpu->decisions[i][lane];
          const policies::LaneDecision& got = on_gpu->decisions[i][lane];
          EXPECT_EQ(got.kept, expected.kept);
          EXPECT_EQ(got.begins, expected.begins);
          EXPECT_EQ(got.members, expected.members);
          all &= expected.kept.size() == (i == 0 ? kPrompt : kPrompt + kDecoded);
        }
      }
      EXPECT_FALSE(all) << "nothing was chosen";
      EXPECT_EQ(on_gpu->reads, 0u);
      EXPECT_GT(on_gpu->looks, 0u);
    }
  }
}

TEST_F(ChoicesTest, ADeviceThatCannotLookIsTold) {
  const char* const text = "snapkv:tokens=40,window=8";
  for (TestNode* node : {&cpu_, &gpu_}) {
    node->device().FailLooks(absl::UnavailableError("it is gone"));
    const absl::Status status = Choose(*node, text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_THAT(std::string(AsStringView(status.message())), HasSubstr("layer 1: it is gone"));
    node->device().FailLooks(absl::OkStatus());
    node->device().set_most_lanes(0);
    EXPECT_EQ(Choose(*node, text).status().code(), absl::StatusCode::kResourceExhausted);
    // Who goes by positions asks for no keys.
    EXPECT_TRUE(Choose(*node, "streaming:sink=2,recent=20").ok());
    node->device().set_most_lanes(2);
    EXPECT_TRUE(Choose(*node, text).ok());
  }
}

}  // namespace
}  // namespace tessera::compaction
