// Sequences in GPU memory, packed and attended there. The GPU is emulated, so that the tests can
// read its memory.

#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "daemon/compaction/jobs/compactor.h"
#include "daemon/device/cuda_device.h"
#include "gtest/gtest.h"
#include "kernels/cuda/common/error_bound.h"
#include "kernels/dispatch/implementation.h"
#include "tests/contract/attend/attend_batch.h"
#include "tests/fakes/gpu/emulated_runtime.h"
#include "tests/fakes/gpu/shared_gpu.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/unit/cache/image.h"
#include "tests/unit/cache/packed.h"

namespace tessera::cache {
namespace {

constexpr std::uint64_t kGpuExtent = std::uint64_t{2} << 20;

// Attention as a device computes it for the daemon.
class DeviceSubject final : public kernels::AttendSubject {
 public:
  DeviceSubject(device::Device& device, device::PoolView pool)
      : device_(device), pool_(std::move(pool)) {}

  std::string_view name() const override { return device_.description().kernels; }
  bool supported() const override { return true; }
  std::string reason() const override { return ""; }
  kernels::ErrorBound bound(kernels::ElementType type) const override {
    return kernels::cuda::CudaErrorBound(type);
  }
  kernels::ErrorBound bound_of(const kernels::TileShape& shape) const override {
    return shape.packed() ? kernels::cuda::PackedErrorBound(kernels::ValuesOf(shape.format))
                          : bound(kernels::ElementsOf(shape.format));
  }
  bool rows_are_independent() const override { return true; }

  kernels::AttendResult Run(const kernels::AttendBatch& batch, kernels::Executor&) override {
    const absl::StatusOr<std::string_view> ran = device_.Attend(batch, pool_);
    EXPECT_TRUE(ran.ok()) << ran.status();
    if (!ran.ok()) return {.status = kernels::AttendStatus::kBadTile};
    return {.status = kernels::AttendStatus::kOk, .implementation = *ran};
  }
  kernels::AttendResult Choose(const kernels::AttendBatch& batch, kernels::Executor&,
                               kernels::SelectionSink& sink) override {
    const absl::StatusOr<std::string_view> ran = device_.Select(batch, pool_, sink);
    EXPECT_TRUE(ran.ok()) << ran.status();
    if (!ran.ok()) return {.status = kernels::AttendStatus::kBadTile};
    return {.status = kernels::AttendStatus::kOk, .implementation = *ran};
  }

 private:
  device::Device& device_;
  const device::PoolView pool_;
};

// Normally distributed rows, as a model computes them, not tied to tokens.
class NormalRows final : public MadeRows {
 public:
  NormalRows(const shm::LaneLayout& layout, std::uint64_t seed) : MadeRows(layout), seed_(seed) {}

  void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const kernels::DenseTile tile = layout_.tile(layer);
    std::mt19937_64 random(seed_ + layer * 1000003 + kv_head * 1009 + first);
    std::normal_distribution<float> normal;
    const std::size_t bytes = kernels::ElementBytes(tile.type);
    for (std::byte* rows : {key, value}) {
      for (std::size_t i = 0; i < std::size_t{count} * tile.head_dim; ++i) {
        const float x = normal(random);
        const std::uint16_t half = tile.type == kernels::ElementType::kBf16
                                       ? kernels::FloatToBf16(x)
                                       : kernels::FloatToFp16(x);
        std::memcpy(rows + i * bytes, bytes == 4 ? static_cast<const void*>(&x) : &half, bytes);
      }
    }
  }

 private:
  const std::uint64_t seed_;
};

class PackOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    auto gpu = device::CudaDevice::Create({.calls = &memory_, .gpus = &gpus_, .ordinal = 0});
    ASSERT_TRUE(gpu.ok()) << gpu.status();
    device_ = *std::move(gpu);
    world_.emplace(World::Options{.device = device_.get(), .pool_extent_bytes = kGpuExtent});
    worker_.emplace(world_->tenant(), world_->OpenSession());
  }
  void TearDown() override {
    if (!worker_.has_value()) return;
    world_->tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_->ExpectBaseline();
  }

  std::shared_ptr<const Model> RandomModel(int round) {
    const kernels::ElementType types[] = {kernels::ElementType::kBf16, kernels::ElementType::kFp16,
                                          kernels::ElementType::kFp32};
    const kernels::ElementType type = random_.Pick(types);
    const std::string name = std::to_string(round);
    return world_->Register(random_.OneIn(2) ? MixedModel(name, type)
                                             : SmallModel(name, 2, 2, type));
  }
  SequenceView View(const Sequence& sequence) {
    absl::StatusOr<SequenceView> view = ReadSequence(world_->tenant(), sequence);
    EXPECT_TRUE(view.ok()) << view.status();
    return *std::move(view);
  }

  // K and V of every entry, by lane, in the model's own space.
  std::vector<std::vector<double>> RowsOfLanes(const Sequence& sequence) {
    const SequenceView view = View(sequence);
    std::vector<std::vector<double>> rows;
    for (const SequenceView::LaneOf& lane : view.lanes) {
      const kernels::LayerGeometry& geometry = sequence.model().geometry(lane.layer);
      const kernels::LaneView shown = {.segments = &view.segments[lane.first_segment],
                                       .segment_count = lane.resolved.segments,
                                       .tail = {}};
      std::vector<double>& all = rows.emplace_back();
      const kernels::ExactLane exact(shown, geometry);
      for (const kernels::ExactLane::Entry& entry : exact.entries()) {
        all.insert(all.end(), entry.key, entry.key + geometry.head_dim);
        all.insert(all.end(), entry.value, entry.value + geometry.head_dim);
      }
    }
    return rows;
  }

  // Compares attention over every layer of a sequence with its definition.
  void JudgeAttention(const Sequence& sequence, std::uint64_t tokens) {
    const SequenceView view = View(sequence);
    DeviceSubject subject(*device_, world_->tenant().pool().View());
    std::map<std::uint32_t, std::vector<kernels::LaneView>> layers;
    for (const SequenceView::LaneOf& lane : view.lanes) {
      layers[lane.layer].push_back(
          {.segments = &view.segments[lane.first_segment],
           .segment_count = lane.resolved.segments,
           .tail = {.begin = lane.resolved.tail_start, .end = lane.resolved.tail_start}});
    }
    for (const auto& [layer, lanes] : layers) {
      SCOPED_TRACE("layer " + std::to_string(layer));
      kernels::TestBatch batch({.geometry = sequence.model().geometry(layer)}, random_);
      std::vector<const kernels::LaneView*> heads;
      for (const kernels::LaneView& lane : lanes) heads.push_back(&lane);
      const auto queries = static_cast<std::uint32_t>(random_.Between(1, 3));
      batch.AddViews(heads, queries, random_.Below(tokens));
      ASSERT_EQ(batch.Run(subject).status, kernels::AttendStatus::kOk);
      ASSERT_NO_FATAL_FAILURE(batch.Judge(subject, random_));
    }
  }

  TestRandom random_;
  tests::SharedGpu memory_;
  tests::EmulatedGpus gpus_;
  std::unique_ptr<device::CudaDevice> device_;
  std::optional<World> world_;
  std::optional<TestWorker> worker_;
};

TEST_F(PackOnGpu, EveryRowIsWhatTheReferenceMakesOfIt) {
  for (int round = 0; round < 8; ++round) {
    const auto model = RandomModel(round);
    const auto sequence = world_->NewSequence(worker_->session(), *model);
    const std::vector<std::uint64_t> stamps = NewStamps(random_.Between(1, 100));
    ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
    TestPacking packing = RandomPacking(random_, *model, 0, model->layers());
    while (packing.spec.key_rotations != nullptr) {
      packing = RandomPacking(random_, *model, 0, model->layers());
    }
    const absl::StatusOr<PackOutcome> outcome = sequence->Pack(packing.spec, Proceed);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(outcome->entries_packed, stamps.size() * model->lanes());
    EXPECT_EQ(PackedDiffers(View(*sequence), *model,
                            std::vector<std::vector<std::uint64_t>>(model->layers(), stamps)),
              "");
    ASSERT_TRUE(world_->tenant().FreeSequence(sequence->id()).ok());
  }
}

TEST_F(PackOnGpu, WhatIsOffloadedComesBackByteForByte) {
  for (int round = 0; round < 8; ++round) {
    const auto model = RandomModel(round);
    const auto sequence = world_->NewSequence(worker_->session(), *model);
    std::vector<std::uint64_t> stamps = NewStamps(random_.Between(1, 150));
    ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
    if (random_.OneIn(2)) {
      const TestPacking packing = RandomPacking(random_, *model, 0, model->layers());
      ASSERT_TRUE(sequence->Pack(packing.spec, Proceed).ok());
    }
    const std::vector<std::uint64_t> more = NewStamps(random_.Between(1, 40));
    ASSERT_TRUE(AppendAll(*sequence, stamps.size(), more).ok());
    stamps.insert(stamps.end(), more.begin(), more.end());
    const std::vector<std::byte> before = Image(View(*sequence));
    const absl::StatusOr<std::uint64_t> moved = sequence->Offload({});
    ASSERT_TRUE(moved.ok()) << moved.status();
    EXPECT_GT(*moved, 0u);
    world_->tenant().epochs().Collect();
    EXPECT_EQ(world_->tenant().account().used_bytes(pool::MemoryTag::kTiles), 0u);
    // Other sequences take its place meanwhile.
    const auto other = world_->NewSequence(worker_->session(), *model);
    ASSERT_TRUE(AppendAll(*other, 0, NewStamps(100)).ok());
    ASSERT_TRUE(sequence->Restore().ok());
    EXPECT_EQ(Image(View(*sequence)), before);
    ASSERT_NO_FATAL_FAILURE(JudgeAttention(*sequence, stamps.size()));
    for (const SequenceId id : {other->id(), sequence->id()}) {
      ASSERT_TRUE(world_->tenant().FreeSequence(id).ok());
    }
    world_->tenant().epochs().Collect();
  }
}

TEST_F(PackOnGpu, WhatIsPackedIsAttendedOverAsItIsStored) {
  for (int round = 0; round < 8; ++round) {
    const auto model = RandomModel(round);
    const auto sequence = world_->NewSequence(worker_->session(), *model);
    const NormalRows rows(model->layout(), random_.Bits());
    std::uint64_t tokens = 0;
    const auto append = [&] {
      const std::uint64_t more = random_.Between(1, 60);
      const auto held = sequence->Append(
          {.first_layer = 0, .layers = model->layers(), .first_token = tokens, .tokens = more},
          rows);
      ASSERT_TRUE(held.ok()) << held.status();
      tokens += more;
    };
    const int parts = static_cast<int>(random_.Between(1, 2));
    for (int part = 0; part < parts; ++part) {
      ASSERT_NO_FATAL_FAILURE(append());
      const TestPacking packing = RandomPacking(random_, *model, 0, model->layers());
      const absl::StatusOr<PackOutcome> outcome = sequence->Pack(packing.spec, Proceed);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
    }
    if (random_.OneIn(2)) {
      ASSERT_NO_FATAL_FAILURE(append());
    }
    ASSERT_NO_FATAL_FAILURE(JudgeAttention(*sequence, tokens));
    ASSERT_TRUE(world_->tenant().FreeSequence(sequence->id()).ok());
  }
}

// Every lane has its own rotations and keeps all channels. Rotated back, rows equal the originals
// up to rounding to bf16, about 2^-8 of a row's length.
TEST_F(PackOnGpu, RotatedRowsTurnBackIntoWhatWasAppended) {
  for (int round = 0; round < 4; ++round) {
    const auto model = world_->Register(SmallModel(std::to_string(round), 2, 2));
    const auto sequence = world_->NewSequence(worker_->session(), *model);
    const std::uint64_t tokens = random_.Between(1, 100);
    ASSERT_TRUE(sequence
                    ->Append({.first_layer = 0, .layers = 2, .first_token = 0, .tokens = tokens},
                             NormalRows(model->layout(), random_.Bits()))
                    .ok());
    const std::vector<std::vector<double>> appended = RowsOfLanes(*sequence);
    TestPacking packing;
    packing.spec.rotation_type =
        random_.OneIn(2) ? kernels::ElementType::kBf16 : kernels::ElementType::kFp32;
    packing.key = RandomRotations(random_, 4, 64, 64, packing.spec.rotation_type);
    packing.value = RandomRotations(random_, 4, 64, 64, packing.spec.rotation_type);
    packing.spec.key_rotations = packing.key.data();
    packing.spec.value_rotations = packing.value.data();
    kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
    shape.format = kernels::TileFormat::kPackedBf16;
    packing.spec.shapes.assign(2, shape);
    const absl::StatusOr<PackOutcome> outcome = sequence->Pack(packing.spec, Proceed);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    const std::vector<std::vector<double>> packed = RowsOfLanes(*sequence);
    ASSERT_EQ(packed.size(), appended.size());
    for (std::size_t lane = 0; lane < packed.size(); ++lane) {
      ASSERT_EQ(packed[lane].size(), 2 * 64 * tokens);
      for (std::size_t i = 0; i < packed[lane].size(); ++i) {
        ASSERT_NEAR(packed[lane][i], appended[lane][i], 0.2) << "lane " << lane << " at " << i;
      }
    }
  }
}

// The compactor makes strategies on the host from rows that it downloads, and lets the device
// encode rows that it uploads. All channels are kept, so rows change only by rounding, in every
// form.
TEST_F(PackOnGpu, ACompactorFetchesRowsAndBringsThem) {
  ManualScheduler scheduler;
  Logger logger({.level = LogLevel::kError});
  compaction::Compactor compactor(
      {.scheduler = &scheduler,
       .logger = &logger,
       .clock = &world_->clock(),
       .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  policies::Policy policy;
  policy.mosaic.emplace();
  policy.mosaic->strategy.kept = {1.0};
  policy.mosaic->strategy.groups = {1};
  policy.mosaic->strategy.threshold = {.key = 1, .value = 1};
  policy.mosaic->segments = {
      .tokens = 512, .min_tokens = 64, .sinks = 0, .recent = 0, .loss_window = 64};
  const auto model = world_->Register(SmallModel("m", 2, 2));
  const auto sequence = world_->NewSequence(worker_->session(), *model);
  ASSERT_TRUE(compactor.SetPolicy(*sequence, policy).ok());
  const auto run = [&] {
    while (scheduler.RunNext().has_value()) {
    }
  };
  const auto forms = [&] {
    std::vector<std::string> seen;
    for (const SegmentRun& form : sequence->Form()) {
      seen.push_back(std::string(form.provisional      ? "provisional "
                                 : form.shape.packed() ? "sealed "
                                                       : "plain ") +
                     std::to_string(form.entries));
    }
    return seen;
  };
  std::uint64_t tokens = 0;
  std::vector<std::vector<double>> given(model->lanes());
  const auto append = [&](std::uint64_t more) {
    ASSERT_TRUE(sequence
                    ->Append({.first_layer = 0, .layers = 2, .first_token = tokens, .tokens = more},
                             NormalRows(model->layout(), random_.Bits()))
                    .ok());
    tokens += more;
    const std::vector<std::vector<double>> now = RowsOfLanes(*sequence);
    for (std::size_t lane = 0; lane < now.size(); ++lane) {
      given[lane].insert(given[lane].end(),
                         now[lane].begin() + static_cast<std::ptrdiff_t>(given[lane].size()),
                         now[lane].end());
    }
  };
  const auto judge = [&] {
    const std::vector<std::vector<double>> now = RowsOfLanes(*sequence);
    ASSERT_EQ(now.size(), given.size());
    for (std::size_t lane = 0; lane < now.size(); ++lane) {
      ASSERT_EQ(now[lane].size(), given[lane].size());
      for (std::size_t i = 0; i < now[lane].size(); ++i) {
        ASSERT_NEAR(now[lane][i], given[lane][i], 0.2) << "lane " << lane << " at " << i;
      }
    }
    ASSERT_NO_FATAL_FAILURE(JudgeAttention(*sequence, tokens));
  };
  absl::Status told = absl::UnknownError("nothing was told");
  const auto compress = [&] {
    compactor.Compress(sequence, {0, 2, true}, [&](absl::Status status) { told = status; });
    run();
    ASSERT_TRUE(told.ok()) << told;
  };

  ASSERT_NO_FATAL_FAILURE(append(100));
  ASSERT_NO_FATAL_FAILURE(compress());
  EXPECT_EQ(forms(), std::vector<std::string>({"sealed 400"}));
  ASSERT_NO_FATAL_FAILURE(judge());
  ASSERT_NO_FATAL_FAILURE(append(70));
  compactor.TailsMoved(sequence);
  run();
  EXPECT_EQ(forms(), std::vector<std::string>({"sealed 400", "provisional 256", "plain 24"}));
  ASSERT_NO_FATAL_FAILURE(judge());
  ASSERT_NO_FATAL_FAILURE(append(26));
  compactor.TailsMoved(sequence);
  run();
  EXPECT_EQ(forms(), std::vector<std::string>({"sealed 400", "provisional 384"}));
  ASSERT_NO_FATAL_FAILURE(judge());
  ASSERT_NO_FATAL_FAILURE(compress());
  EXPECT_EQ(forms(), std::vector<std::string>({"sealed 784"}));
  ASSERT_NO_FATAL_FAILURE(judge());
  ASSERT_TRUE(world_->tenant().FreeSequence(sequence->id()).ok());
}

// If the device fails at any call of a packing, the packing is undone and readers keep the old
// rows.
TEST_F(PackOnGpu, ADeviceThatFailsMeanwhileLeavesTheSequenceAsItWas) {
  int failures = 0;
  bool packed = false;
  for (int good = 0; !packed; ++good) {
    ASSERT_LT(good, 200);
    tests::SharedGpu memory;
    tests::EmulatedGpus gpus;
    gpus.options.fails_after = good;
    auto gpu = device::CudaDevice::Create({.calls = &memory, .gpus = &gpus, .ordinal = 0});
    ASSERT_TRUE(gpu.ok()) << gpu.status();
    World world(World::Options{.device = gpu->get(), .pool_extent_bytes = kGpuExtent});
    TestWorker worker(world.tenant(), world.OpenSession());
    const auto model = world.Register(SmallModel("small", 1, 1));
    const auto sequence = world.NewSequence(worker.session(), *model);
    const std::vector<std::uint64_t> stamps = NewStamps(70);
    if (AppendAll(*sequence, 0, stamps).ok()) {
      kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
      shape.format = kernels::TileFormat::kPackedInt8;
      shape.key.kept = shape.value.kept = 16;
      const absl::Status status = sequence->Pack({.shapes = {shape}}, Proceed).status();
      EXPECT_EQ(status, (*gpu)->health());
      EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
      packed = status.ok();
      failures += packed ? 0 : 1;
      const absl::StatusOr<SequenceView> view = ReadSequence(world.tenant(), *sequence);
      ASSERT_TRUE(view.ok()) << view.status();
      EXPECT_EQ(view->segments[0].shape.packed(), packed);
      EXPECT_EQ(PackedDiffers(*view, *model, {stamps}), "");
    }
    world.tenant().EndSession(worker.session().id());
  }
  EXPECT_GE(failures, 6);  // the encode's three uploads, launch, download and wait
}

}  // namespace
}  // namespace tessera::cache
