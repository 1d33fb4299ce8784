// Positions by place (`pos=slot`): the tokens of all layers have the same positions; until they do,
// reads and writes are refused.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/compaction/lanes/element.h"
#include "daemon/policies/grammar/parse.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr const char* kStreaming = "streaming:sink=2,recent=40,pos=slot";
constexpr std::uint64_t kKept = 42;  // tokens that it keeps

class SlotPositions : public CompactorTest {
 protected:
  SlotPositions() : CompactorTest(0, 96 << 20) {
    cache::ModelSpec spec = cache::SmallModel("slots", 4, 2);
    spec.rope_theta = 10000;
    model_ = world_.Register(spec);
  }
  static policies::Policy Policy(const std::string& text) { return *policies::ParsePolicy(text); }
  absl::Status CompressLayers(Track& track, std::uint32_t first, std::uint32_t layers) {
    const auto told = std::make_shared<absl::Status>(absl::UnknownError("never told"));
    compactor_.Compress(track.sequence, {.first_layer = first, .layers = layers, .all_shown = true},
                        [told](absl::Status status) { *told = std::move(status); });
    RunAll();
    return *told;
  }
  absl::Status CompressAll(Track& track) { return CompressLayers(track, 0, model_->layers()); }
  absl::Status AppendTo(Track& track, std::uint32_t layer, std::uint32_t layers,
                        std::uint64_t first, std::uint64_t tokens) {
    const Stamps stamps = DrawTokens(tokens, first);
    return track.sequence
        ->Append({layer, layers, first, tokens}, DrawnRows(model_->layout(), stamps))
        .status();
  }
  // The position of the next query and key.
  std::uint64_t Next(const Track& track) {
    return worker_->Block(*track.sequence).next_position.load();
  }
  bool AllLanesHold(const Track& track, std::uint64_t entries) {
    for (const auto& lane : track.sequence->Describe(true).lanes) {
      if (lane.entries != entries) return false;
    }
    return true;
  }
  // Some lanes have moved and others have not.
  void ExpectNothingButCompress(Track& track, std::uint64_t tokens) {
    EXPECT_EQ(Next(track), tokens) << "as before";
    EXPECT_EQ(track.sequence->position_shift(), 0u);
    const absl::Status append = AppendTo(track, 0, model_->layers(), tokens, 1);
    EXPECT_TRUE(absl::IsFailedPrecondition(append)) << append;
    EXPECT_THAT(std::string(append.message()), testing::HasSubstr("compress all of its layers"));
    EXPECT_TRUE(absl::IsFailedPrecondition(worker_->Open(*track.sequence).status()));
    EXPECT_TRUE(absl::IsFailedPrecondition(compactor_.Truncate(*track.sequence, tokens - 1)));
  }
  void ExpectGoesOn(Track& track, std::uint64_t tokens) {
    EXPECT_TRUE(AllLanesHold(track, kKept));
    EXPECT_EQ(Next(track), kKept);
    EXPECT_EQ(track.sequence->position_shift(), tokens - kKept);
    EXPECT_TRUE(AppendTo(track, 0, model_->layers(), tokens, 1).ok());
    EXPECT_EQ(Next(track), kKept + 1);
  }
};

TEST_F(SlotPositions, SomeLayersAloneMoveNobody) {
  Track track = NewTrack(Policy(kStreaming));
  Append(track, 100, 1);
  ASSERT_TRUE(CompressLayers(track, 0, 1).ok());
  ExpectNothingButCompress(track, 100);
  EXPECT_TRUE(absl::IsFailedPrecondition(track.sequence->PositionShiftOf(0).status()));
  EXPECT_EQ(track.sequence->PositionShiftOf(1).value(), 0u) << "as before";
  for (const char* other : {"streaming:sink=2,recent=30,pos=slot", "tova:budget=30"}) {
    const absl::Status set = compactor_.SetPolicy(*track.sequence, Policy(other));
    EXPECT_TRUE(absl::IsFailedPrecondition(set)) << other << ": " << set;
    EXPECT_FALSE(track.sequence->has_manual_changes()) << "refused, it changes nothing";
  }
  ASSERT_TRUE(CompressLayers(track, 1, 3).ok());
  ExpectGoesOn(track, 100);
  EXPECT_EQ(track.sequence->PositionShiftOf(0).value(), 100 - kKept);
}

TEST_F(SlotPositions, APromptThatComesLayerByLayerStandsAtOnePlace) {
  Track track = NewTrack(Policy(kStreaming));
  std::uint64_t held = 0;
  for (int prompt = 0; prompt < 3; ++prompt) {
    const std::uint64_t before = Next(track);
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      EXPECT_EQ(Next(track), before) << "prompt " << prompt << ", before layer " << layer;
      ASSERT_TRUE(AppendTo(track, layer, 1, held, 100).ok());
      ASSERT_TRUE(CompressLayers(track, layer, 1).ok());
    }
    held += 100;
    EXPECT_EQ(track.sequence->position_shift(), held - kKept);
    EXPECT_EQ(Next(track), kKept);
  }
}

// The worker would not know, so tokens move only in calls that it makes.
TEST_F(SlotPositions, APromptsEndMovesNobody) {
  Track track = NewTrack(Policy(kStreaming));
  Append(track, 100, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_TRUE(AllLanesHold(track, 100));
  EXPECT_EQ(Next(track), 100u);
  ASSERT_TRUE(CompressAll(track).ok());
  ExpectGoesOn(track, 100);
}

// The missing rows of a layer would have other positions than its rows, so the layer is not moved
// without them.
TEST_F(SlotPositions, LayersThatStayedBehindWaitForTheirRows) {
  Track track = NewTrack(Policy(kStreaming));
  ASSERT_TRUE(AppendTo(track, 0, 1, 0, 100).ok());
  ASSERT_TRUE(AppendTo(track, 1, 1, 0, 50).ok());
  ASSERT_TRUE(AppendTo(track, 2, 2, 0, 100).ok());
  for (const std::uint32_t first : {0u, 1u}) {
    const absl::Status early = CompressLayers(track, first, model_->layers() - first);
    EXPECT_TRUE(absl::IsFailedPrecondition(early)) << early;
    EXPECT_THAT(std::string(early.message()), testing::HasSubstr("append the missing rows"));
    EXPECT_FALSE(track.sequence->HasMoved());
  }
  ASSERT_TRUE(CompressLayers(track, 0, 1).ok()) << "that one misses none";
  ASSERT_TRUE(AppendTo(track, 1, 1, 50, 50).ok());
  ASSERT_TRUE(CompressAll(track).ok());
  ExpectGoesOn(track, 100);
}

// Rows that arrive after the choice and before its execution.
TEST_F(SlotPositions, RowsThatComeInBetweenMoveWithTheOthers) {
  CallbackClock clock;
  Compactor compactor({.scheduler = &scheduler_,
                       .logger = &logger_,
                       .clock = &clock,
                       .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  for (const char* text : {"lacache:budget=40,span=2,overlap=1,sink=2,pos=slot", kStreaming}) {
    SCOPED_TRACE(text);
    Track track = NewTrack(Policy(text));
    Append(track, 100, 1);
    clock.After(2, [&] { ASSERT_TRUE(AppendTo(track, 0, model_->layers(), 100, 10).ok()); });
    absl::Status told;
    compactor.Compress(track.sequence, {0, model_->layers(), true},
                       [&](absl::Status status) { told = std::move(status); });
    RunAll();
    EXPECT_TRUE(told.ok()) << told;
    EXPECT_LE(Next(track), kKept);
    EXPECT_TRUE(AllLanesHold(track, Next(track)));
    EXPECT_EQ(track.sequence->position_shift(), 110 - Next(track));
  }
}

// ---- Tails

// The worker writes for the positions that it was told when the tail was opened.
TEST_F(SlotPositions, ATailIsClosedBeforeAnythingMoves) {
  Track track = NewTrack(Policy(kStreaming));
  Append(track, 100, 1);
  Decode(track, 4, 1);
  ASSERT_TRUE(CompressLayers(track, 0, 1).ok());
  EXPECT_FALSE(track.sequence->decoding());
  EXPECT_EQ(worker_->Block(*track.sequence).tail_generation.load(), 0u);
  ExpectNothingButCompress(track, 104);
  ASSERT_TRUE(CompressLayers(track, 1, 3).ok());
  const auto tail = worker_->Open(*track.sequence);
  ASSERT_TRUE(tail.ok()) << tail.status();
  EXPECT_EQ(tail->place.tail.tokens, 104u);
  EXPECT_EQ(tail->place.tail.position_shift, 104 - kKept);
  ExpectGoesOn(track, 104);
}

TEST_F(SlotPositions, NoTailIsOpenedUntilAllHasMoved) {
  Track track = NewTrack(Policy(kStreaming));
  Append(track, 100, 1);
  absl::Status told = absl::UnknownError("never told");
  compactor_.Compress(track.sequence, {0, model_->layers(), true},
                      [&](absl::Status status) { told = std::move(status); });
  do {
    const absl::Status early = worker_->Open(*track.sequence).status();
    EXPECT_TRUE(absl::IsAborted(early)) << early;
  } while (scheduler_.RunNext().has_value() && absl::IsUnknown(told));
  ASSERT_TRUE(told.ok()) << told;
  EXPECT_TRUE(worker_->Open(*track.sequence).ok());
  Collect();
}

// If there is no room to close the tail, nothing moves and it stays open.
TEST_F(SlotPositions, ATailThatCannotBeClosedStays) {
  Track track = NewTrack(Policy(kStreaming));
  Append(track, 100, 1);
  Decode(track, 20, 1);
  auto& account = const_cast<pool::Account&>(world_.tenant().account());
  auto squeezed =
      *account.Reserve(pool::MemoryTag::kPoolExtents, account.limit_bytes() - account.used_bytes());
  const absl::Status status = CompressAll(track);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_FALSE(track.sequence->HasMoved());
  EXPECT_TRUE(track.sequence->decoding());
  squeezed.Reset();
  ASSERT_TRUE(CompressAll(track).ok());
  ExpectGoesOn(track, 120);
}

// Wherever memory runs out, tokens keep their positions, or all of them move.
TEST_F(SlotPositions, MemoryThatRunsOutInBetweenMovesNobody) {
  int failed = 0;
  int halfway = 0;
  for (std::uint64_t room = 4096; room < 400'000; room += 4096) {
    SCOPED_TRACE(room);
    Track track = NewTrack(Policy(kStreaming));
    Append(track, 200, 1);
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    const std::uint64_t free = account.limit_bytes() - account.used_bytes();
    ASSERT_GT(free, room);
    auto squeezed = *account.Reserve(pool::MemoryTag::kPoolExtents, free - room);
    // Delays the freeing of evicted rows.
    std::optional<cache::Tenant::Reader> reader(world_.tenant());
    const absl::Status status = CompressAll(track);
    reader.reset();
    Collect();
    squeezed.Reset();
    if (!status.ok()) {
      ++failed;
      EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
      if (!AllLanesHold(track, 200)) {
        ++halfway;
        ExpectNothingButCompress(track, 200);
      }
      ASSERT_TRUE(CompressAll(track).ok());
    }
    ExpectGoesOn(track, 200);
    track.sequence->Free();
    Collect();
    if (status.ok()) break;
  }
  EXPECT_GT(failed, 1);
  EXPECT_GT(halfway, 1);
}

// ---- Rows that cannot be moved

// If some layers could be moved but others never can.
TEST_F(SlotPositions, NothingMovesWhereAnythingIsPacked) {
  for (const int sealed : {1, 3, 8}) {
    SCOPED_TRACE(sealed);
    Track track = NewTrack(Policy("mosaickv:sinks=0,recent=0,min_segment=32,segment=64"));
    Append(track, 128, 1, /*end_of_prompt=*/true);
    for (int job = 0; job < sealed; ++job) scheduler_.RunNext();
    Track fork = Fork(track);
    for (const Track* each : {&std::as_const(track), &std::as_const(fork)}) {
      const absl::Status set = compactor_.SetPolicy(*each->sequence, Policy(kStreaming));
      EXPECT_TRUE(absl::IsFailedPrecondition(set)) << set;
      EXPECT_THAT(std::string(set.message()), testing::HasSubstr("packed entries"));
    }
    RunAll();
    EXPECT_TRUE(AppendTo(track, 0, model_->layers(), 128, 1).ok());
  }
}

TEST_F(SlotPositions, NothingMovesWhereACallHasPackedMeanwhile) {
  Track track = NewTrack(policies::Policy());
  Append(track, 100, 1);
  kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
  shape.format = kernels::TileFormat::kPackedBf16;
  shape.key.kept = shape.value.kept = 16;
  cache::PackSpec spec;
  spec.first_layer = 2;
  spec.shapes = {shape};
  bool set = false;
  const auto packed = track.sequence->Pack(spec, [&] {
    if (std::exchange(set, true)) return absl::OkStatus();
    EXPECT_TRUE(compactor_.SetPolicy(*track.sequence, Policy(kStreaming)).ok());
    EXPECT_TRUE(absl::IsAborted(CompressAll(track)));
    return absl::OkStatus();
  });
  ASSERT_TRUE(packed.ok()) << packed.status();
  const absl::Status status = CompressAll(track);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_FALSE(track.sequence->HasMoved());
  EXPECT_TRUE(AppendTo(track, 0, model_->layers(), 100, 1).ok());
  EXPECT_TRUE(compactor_.SetPolicy(*track.sequence, policies::Policy()).ok());
}

// Rows in which every element has this value.
struct AllAlike final : cache::RowSource {
  AllAlike(kernels::ElementType type, float value) : row(64 * kernels::ElementBytes(type)) {
    for (std::uint32_t d = 0; d < 64; ++d) SetElement(row.data(), type, d, value);
  }
  device::Place place() const override { return device::Place::kHost; }
  cache::RowSpan At(std::uint32_t, std::uint32_t, std::uint64_t, std::uint32_t) const override {
    return {row.data(), row.data(), row.size(), 1};
  }
  std::vector<std::byte> row;
};

// Rotation may make an element larger than any appended one.
TEST_F(SlotPositions, KeysStayUsableHoweverLargeTheyAre) {
  for (const auto& [type, value] : {std::pair{kernels::ElementType::kFp16, 60000.0f},
                                    std::pair{kernels::ElementType::kBf16, 9e18f},
                                    std::pair{kernels::ElementType::kFp32, -9.2e18f}}) {
    for (const char* text :
         {kStreaming, "semanticache:delimiters=0,key_space=pre,tau=0.1,sink=2,recent=4",
          "semanticache:delimiters=0,key_space=pre,tau=0.1+mosaickv:sinks=0,recent=0,min_segment="
          "32,segment=64"}) {
      SCOPED_TRACE(std::string(kernels::ElementName(type)) + " " + text);
      cache::ModelSpec spec = cache::SmallModel(kernels::ElementName(type), 1, 1, type);
      spec.rope_theta = 10000;
      model_ = world_.Register(spec);
      const absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
      Track track = NewTrack(*policy);
      ASSERT_TRUE(track.sequence->Append({0, 1, 0, 100}, AllAlike(type, value)).ok());
      const absl::Status status = CompressAll(track);
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_FALSE(track.sequence->failed());
    }
  }
}

TEST_F(SlotPositions, WhatIsCutToNothingBeginsAnew) {
  for (const char* text : {"lacache:budget=40,span=2,overlap=1,sink=2,pos=slot", kStreaming}) {
    SCOPED_TRACE(text);
    Track track = NewTrack(Policy(text));
    Append(track, 100, 1);
    ASSERT_TRUE(CompressLayers(track, 0, 2).ok());
    ASSERT_TRUE(compactor_.Truncate(*track.sequence, 0).ok());
    EXPECT_EQ(Next(track), 0u);
    ASSERT_TRUE(AppendTo(track, 0, model_->layers(), 0, 100).ok());
    EXPECT_EQ(Next(track), 100u);
    ASSERT_TRUE(CompressAll(track).ok());
    EXPECT_TRUE(AllLanesHold(track, Next(track)));
  }
}

}  // namespace
}  // namespace tessera::compaction
