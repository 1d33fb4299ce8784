// Offloading and restoring of sequences: byte for byte, all or nothing, and never during a read, a
// step or another call.

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/cache/image.h"
#include "tests/unit/cache/sequence/recode_fixture.h"

namespace tessera::cache {
namespace {

using testing::HasSubstr;

class Offload : public RecodeFixture {
 protected:
  std::shared_ptr<Sequence> New() { return world_.NewSequence(worker_->session(), *small_); }
  std::uint64_t Gone(Sequence& sequence) {
    const absl::StatusOr<std::uint64_t> bytes = sequence.Offload({});
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return bytes.value_or(0);
  }
  std::uint32_t State(const Sequence& sequence) { return worker_->Block(sequence).state.load(); }
  std::uint64_t InPool() {
    Collect();
    return Used(pool::MemoryTag::kTiles) + Used(pool::MemoryTag::kTables) +
           Used(pool::MemoryTag::kRotations);
  }
  std::uint64_t Stored() { return world_.tenant().offloaded().used_bytes(); }
};

TEST_F(Offload, DenseRowsComeBackByteForByte) {
  const auto sequence = New();
  Stamps stamps = Fill(*sequence, 200);
  const std::vector<std::byte> before = Image(View(*sequence));
  const std::uint64_t in_pool = InPool();
  ASSERT_GT(in_pool, 0u);

  EXPECT_EQ(Gone(*sequence), in_pool);
  EXPECT_EQ(InPool(), 0u);
  EXPECT_EQ(Stored(), sequence->Describe(false).stored_bytes);
  EXPECT_EQ(world_.host_tier().used_bytes(), Stored());
  EXPECT_GT(Stored(), 0u);
  EXPECT_EQ(State(*sequence), shm::kSequenceOffloaded);
  EXPECT_EQ(Used(pool::MemoryTag::kSnapshots), 0u);
  const Sequence::Description told = sequence->Describe(/*lanes=*/true);
  EXPECT_TRUE(told.offloaded);
  EXPECT_EQ(told.tokens, 200u);
  EXPECT_EQ(told.tile_bytes, 0u);
  EXPECT_EQ(told.lanes.front().entries, 200u);
  EXPECT_EQ(Gone(*sequence), 0u);  // nothing is left to offload

  {
    const auto stays = sequence->Restore();
    ASSERT_TRUE(stays.ok()) << stays.status();
    EXPECT_EQ(State(*sequence), shm::kSequenceLive);
    EXPECT_EQ(Image(View(*sequence)), before);
    EXPECT_EQ(InPool(), in_pool);
    EXPECT_EQ(Stored(), 0u);
  }
  EXPECT_EQ(Shown(*sequence, stamps), "");
  AppendMore(*sequence, stamps, 50);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Offload, PackedRowsComeBackWithTheirRotations) {
  for (int round = 0; round < 12; ++round) {
    const auto sequence = New();
    Stamps stamps = Fill(*sequence, random_.Between(1, 150));
    const TestPacking packing = RandomPacking(random_, *small_, 0, small_->layers());
    // Several packed segments per lane, so that some share rotations, followed by a dense one.
    ASSERT_TRUE(sequence->Pack(packing.spec, Proceed).ok());
    if (random_.OneIn(2)) AppendMore(*sequence, stamps, random_.Between(1, 60));
    const std::vector<std::byte> before = Image(View(*sequence));
    const std::uint64_t in_pool = InPool();
    EXPECT_EQ(Gone(*sequence), in_pool);
    EXPECT_EQ(InPool(), 0u);
    ASSERT_TRUE(sequence->Restore().ok());
    EXPECT_EQ(Image(View(*sequence)), before);
    EXPECT_EQ(InPool(), in_pool);
    EXPECT_EQ(Shown(*sequence, stamps), "");
    ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
    Collect();
  }
}

// A fork cut in two packings shares its first segment's rotations with its second: they are stored
// once.
TEST_F(Offload, RotationsThatSegmentsShareAreStoredOnce) {
  const auto sequence = New();
  Stamps stamps = Fill(*sequence, 40);
  const auto child = world_.tenant().Fork(worker_->session(), sequence->id());
  ASSERT_TRUE(child.ok());
  // After the frozen segment: two dense segments, to which one packing gives one strategy.
  ASSERT_TRUE(world_.tenant().FreeSequence((*child)->id()).ok());
  AppendMore(*sequence, stamps, 40);
  TestPacking packing;
  packing.spec = All(*small_, Quarter());
  packing.key = RandomRotations(random_, 4, 64, 64, kernels::ElementType::kBf16);
  packing.value = RandomRotations(random_, 4, 64, 64, kernels::ElementType::kBf16);
  packing.spec.key_rotations = packing.key.data();
  packing.spec.value_rotations = packing.value.data();
  ASSERT_TRUE(sequence->Pack(packing.spec, Proceed).ok());
  ASSERT_GE(View(*sequence).lanes[0].resolved.segments, 1u);
  Collect();
  const std::uint64_t rotations = Used(pool::MemoryTag::kRotations);
  const std::uint64_t tiles = Used(pool::MemoryTag::kTiles);
  ASSERT_GT(rotations, 0u);
  Gone(*sequence);
  EXPECT_EQ(Stored(), tiles + rotations);
  ASSERT_TRUE(sequence->Restore().ok());
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), rotations);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Offload, WhatAForkSharesStays) {
  const auto parent = New();
  Stamps stamps = Fill(*parent, 100);
  const auto child = world_.tenant().Fork(worker_->session(), parent->id());
  ASSERT_TRUE(child.ok());
  const std::uint64_t shared = InPool();
  EXPECT_EQ(Gone(*parent), 0u);
  EXPECT_FALSE(parent->offloaded());
  Stamps mine = stamps;
  AppendMore(*parent, mine, 70);
  const std::uint64_t alone = InPool() - shared;
  EXPECT_EQ(Gone(*parent), alone);
  EXPECT_TRUE(parent->offloaded());
  EXPECT_EQ(InPool(), shared);
  EXPECT_EQ(Shown(**child, stamps), "");
  // The child is gone, so what they shared may be offloaded, too.
  ASSERT_TRUE(world_.tenant().FreeSequence((*child)->id()).ok());
  EXPECT_EQ(InPool(), shared);
  EXPECT_EQ(Gone(*parent), 0u + shared);
  EXPECT_EQ(InPool(), 0u);
  ASSERT_TRUE(parent->Restore().ok());
  EXPECT_EQ(Shown(*parent, mine), "");
}

TEST_F(Offload, AnOpenTailIsAbsorbedAndClosedFirst) {
  const auto sequence = New();
  Stamps stamps = Fill(*sequence, 50);
  auto tail = worker_->Open(*sequence);
  ASSERT_TRUE(tail.ok());
  for (const std::uint64_t stamp : NewStamps(37)) {
    worker_->Write(*sequence, *tail, stamps.size(), stamp);
    stamps.push_back(stamp);
  }
  worker_->Commit(*tail, stamps.size());
  EXPECT_GT(Gone(*sequence), 0u);
  EXPECT_FALSE(sequence->decoding());
  EXPECT_EQ(worker_->Block(*sequence).tail_generation.load(), 0u);
  EXPECT_EQ(sequence->Describe(false).tokens, stamps.size());
  EXPECT_TRUE(absl::IsAborted(worker_->Open(*sequence).status()));
  ASSERT_TRUE(sequence->Restore().ok());
  tail = worker_->Open(*sequence);
  ASSERT_TRUE(tail.ok());
  EXPECT_EQ(tail->place.tail.tokens, stamps.size());
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Offload, AStepKeepsItsSequenceWhileItIsPinned) {
  const auto sequence = New();
  Stamps stamps = Fill(*sequence, 50);
  const auto tail = worker_->Open(*sequence);
  ASSERT_TRUE(tail.ok());
  shm::ControlPage& page = worker_->session().control()->page();
  const std::uint64_t word = shm::CommitWord::Pack(tail->place.tail.generation, stamps.size());
  page.commits[tail->place.tail.commit_slot].store(word | shm::CommitWord::kInStep);
  const std::uint64_t pin = shm::Pin(page.readers[3].word, world_.tenant().epochs().epoch());
  EXPECT_TRUE(absl::IsAborted(sequence->Offload({}).status()));
  EXPECT_FALSE(sequence->GetIdleState().may_go);
  EXPECT_EQ(worker_->Block(*sequence).tail_generation.load(), tail->place.tail.generation);
  EXPECT_TRUE(sequence->decoding());
  EXPECT_EQ(sequence->Describe(false).tokens, stamps.size());  // the flag is not counted as a token
  // A worker that hangs in a step loses its pin, and then the sequence can be offloaded.
  ASSERT_TRUE(shm::Revoke(page.readers[3].word, pin));
  EXPECT_GT(Gone(*sequence), 0u);
}

TEST_F(Offload, WhoHasPinnedGoesOnReadingWhatItSaw) {
  const auto sequence = New();
  const Stamps stamps = Fill(*sequence, 90);
  shm::ControlPage& page = worker_->session().control()->page();
  const std::uint64_t pin = shm::Pin(page.readers[0].word, world_.tenant().epochs().epoch());
  const SequenceView view = View(*sequence);
  const std::uint64_t in_pool = InPool();
  EXPECT_EQ(Gone(*sequence), in_pool);
  EXPECT_EQ(InPool(), in_pool);  // freed only after the reader
  ASSERT_TRUE(sequence->Restore().ok());
  EXPECT_EQ(PackedDiffers(view, *small_, std::vector<Stamps>(2, stamps)), "");
  EXPECT_EQ(InPool(), 2 * in_pool);
  ASSERT_TRUE(shm::Unpin(page.readers[0].word, pin));
  EXPECT_EQ(InPool(), in_pool);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Offload, WhatNeedsRowsIsRefusedUntilTheyAreBack) {
  const auto sequence = New();
  Stamps stamps = Fill(*sequence, 64);
  Gone(*sequence);
  EXPECT_TRUE(absl::IsAborted(AppendAll(*sequence, 64, NewStamps(1)).status()));
  EXPECT_TRUE(absl::IsAborted(sequence->Truncate(3)));
  EXPECT_TRUE(absl::IsAborted(sequence->Pack(All(*small_, Quarter()), Proceed).status()));
  EXPECT_TRUE(absl::IsAborted(RecodeAll(sequence, Quarter())));
  EXPECT_TRUE(absl::IsAborted(sequence->LookAt(0, true).status()));
  EXPECT_TRUE(absl::IsAborted(world_.tenant().Fork(worker_->session(), sequence->id()).status()));
  EXPECT_TRUE(sequence->CloseTail().ok());
  EXPECT_TRUE(sequence->AbsorbTail().ok());
  ASSERT_TRUE(sequence->Restore().ok());
  EXPECT_EQ(Shown(*sequence, stamps), "");
  AppendMore(*sequence, stamps, 9);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Offload, ProvisionalRowsWaitWithTheirRawCopies) {
  const auto sequence = New();
  Stamps stamps = Fill(*sequence, 96);
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  AppendMore(*sequence, stamps, 40);
  const std::string forms = Forms(*sequence);
  Gone(*sequence);
  ASSERT_TRUE(sequence->Restore().ok());
  EXPECT_EQ(Forms(*sequence), forms);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  // A segment that was growing continues to grow.
  ASSERT_TRUE(RecodeAll(sequence, Quarter()).ok());
  EXPECT_EQ(Forms(*sequence), "packed 128, plain 8");
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(Offload, NobodyTakesWhatAnotherCallUses) {
  const auto sequence = New();
  const Stamps stamps = Fill(*sequence, 64);
  auto used = sequence->Restore();
  ASSERT_TRUE(used.ok());
  EXPECT_TRUE(absl::IsAborted(sequence->Offload({}).status()));
  EXPECT_FALSE(sequence->GetIdleState().may_go);
  used->Reset();
  EXPECT_TRUE(sequence->GetIdleState().may_go);
  // Nor while it is being packed.
  bool asked = false;
  const auto go_on = [&] {
    asked = true;
    EXPECT_TRUE(absl::IsAborted(sequence->Offload({}).status()));
    return absl::OkStatus();
  };
  ASSERT_TRUE(sequence->Pack(All(*small_, Quarter()), go_on).ok());
  EXPECT_TRUE(asked);
  EXPECT_GT(Gone(*sequence), 0u);
}

// Rows of an append, during which another thread uses the same sequence.
class ReadingRows final : public RowSource {
 public:
  ReadingRows(Sequence& sequence, std::vector<std::uint64_t> stamps)
      : sequence_(sequence), rows_(sequence.model().layout(), std::move(stamps)) {}
  device::Place place() const override { return rows_.place(); }
  RowSpan At(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
             std::uint32_t count) const override {
    std::thread([this] { looked_ += !sequence_.GetIdleState().may_go; }).join();
    return rows_.At(layer, kv_head, first, count);
  }
  int looked() const { return looked_; }

 private:
  Sequence& sequence_;
  const StampedRows rows_;
  mutable int looked_ = 0;
};

// A call that looks for memory must not wait for another tenant's call.
TEST_F(Offload, WhoLooksForRestWaitsForNobody) {
  const auto sequence = New();
  const Stamps stamps = Fill(*sequence, 64);
  ASSERT_TRUE(sequence->GetIdleState().may_go);
  const ReadingRows rows(*sequence, std::vector<std::uint64_t>(32, 7));
  const std::uint32_t layers = sequence->model().layers();
  ASSERT_TRUE(
      sequence->Append({.first_layer = 0, .layers = layers, .first_token = 64, .tokens = 32}, rows)
          .ok());
  EXPECT_GT(rows.looked(), 0);
  EXPECT_TRUE(sequence->GetIdleState().may_go);
}

TEST_F(Offload, UseIsWhatCountsNotAge) {
  const auto sequence = New();
  Stamps stamps = Fill(*sequence, 10);
  const Clock::TimePoint born = sequence->GetIdleState().last_use;
  world_.clock().Advance(std::chrono::seconds(9));
  EXPECT_EQ(sequence->GetIdleState().last_use, born);
  sequence->Restore()->Reset();
  EXPECT_EQ(sequence->GetIdleState().last_use, world_.clock().Now());
  const auto tail = worker_->Open(*sequence);
  ASSERT_TRUE(tail.ok());
  world_.clock().Advance(std::chrono::seconds(1));
  worker_->Write(*sequence, *tail, 10, stamps[0]);
  worker_->Commit(*tail, 11);
  const Clock::TimePoint seen = world_.clock().Now();
  EXPECT_EQ(sequence->GetIdleState().last_use, seen);
  world_.clock().Advance(std::chrono::seconds(1));
  EXPECT_EQ(sequence->GetIdleState().last_use, seen);
  // Used since it was chosen, so it is kept.
  EXPECT_TRUE(absl::IsAborted(
      sequence->Offload({.unused_since = seen - std::chrono::seconds(1)}).status()));
  EXPECT_TRUE(sequence->decoding());
  EXPECT_TRUE(sequence->Offload({.unused_since = seen}).ok());
}

TEST_F(Offload, FreedWhileItIsAwayItLeavesNothing) {
  const auto sequence = New();
  Fill(*sequence, 300);
  Gone(*sequence);
  ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
  Collect();
  EXPECT_EQ(Stored(), 0u);
  EXPECT_TRUE(absl::IsNotFound(sequence->Restore().status()));
  EXPECT_TRUE(absl::IsNotFound(sequence->Offload({}).status()));
}

// ---- No room

class OffloadWithoutRoom : public testing::Test {
 protected:
  using Stamps = std::vector<std::uint64_t>;
  explicit OffloadWithoutRoom(World::Options options = {.tenant_limit = 900'000,
                                                        .host_tier_bytes = 200'000})
      : world_(options) {}
  void TearDown() override {
    world_.tenant().EndSession(session_->id());
    session_ = nullptr;
    world_.ExpectBaseline();
  }
  std::string Shown(const Sequence& sequence, const Stamps& stamps) {
    const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), sequence);
    if (!view.ok()) return view.status().ToString();
    return Differs(*view, sequence.model(), std::vector<Stamps>(sequence.model().layers(), stamps));
  }

  World world_;
  std::shared_ptr<SessionState> session_ = world_.OpenSession();
  std::shared_ptr<const Model> model_ = world_.Register(SmallModel("small", 2, 2));
};

TEST_F(OffloadWithoutRoom, AFullTierChangesNothing) {
  const auto sequence = world_.NewSequence(*session_, *model_);
  Stamps stamps = NewStamps(400);
  ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
  const absl::Status refused = sequence->Offload({}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.ToString(), HasSubstr("host tier: "));
  EXPECT_EQ(world_.host_tier().used_bytes(), 0u);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  const Stamps more = NewStamps(20);
  ASSERT_TRUE(AppendAll(*sequence, 400, more).ok());
  stamps.insert(stamps.end(), more.begin(), more.end());
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(OffloadWithoutRoom, AFullPoolLeavesItAway) {
  const auto sequence = world_.NewSequence(*session_, *model_);
  const Stamps stamps = NewStamps(150);
  ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
  ASSERT_TRUE(sequence->Offload({}).ok());
  const std::uint64_t stored = world_.host_tier().used_bytes();
  world_.tenant().epochs().Collect();
  // Other sequences take all of the pool.
  std::vector<std::shared_ptr<Sequence>> others;
  for (;;) {
    others.push_back(world_.NewSequence(*session_, *model_));
    if (!AppendAll(*others.back(), 0, NewStamps(96)).ok()) break;
  }
  const std::uint64_t used = world_.tenant().account().used_bytes();
  const absl::Status refused = sequence->Restore().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(pool::ShortageOf(refused).has_value());
  EXPECT_EQ(world_.tenant().account().used_bytes(), used);
  EXPECT_EQ(world_.host_tier().used_bytes(), stored);
  EXPECT_TRUE(sequence->offloaded());
  for (const auto& other : others) {
    ASSERT_TRUE(world_.tenant().FreeSequence(other->id()).ok());
  }
  world_.tenant().epochs().Collect();
  ASSERT_TRUE(sequence->Restore().ok());
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

}  // namespace
}  // namespace tessera::cache
