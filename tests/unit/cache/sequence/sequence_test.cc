#include "daemon/cache/sequence/sequence.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "daemon/cache/sequence/join.h"
#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

using Stamps = std::vector<std::uint64_t>;
using kernels::kTileEntries;

class SequenceTest : public testing::Test {
 protected:
  void TearDown() override {
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_.ExpectBaseline();
  }
  std::string Shown(const Sequence& sequence, const std::vector<Stamps>& layers) {
    const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), sequence);
    return view.ok() ? Differs(*view, sequence.model(), layers) : view.status().ToString();
  }
  std::string Shown(const Sequence& sequence, const Stamps& stamps) {
    return Shown(sequence, std::vector<Stamps>(sequence.model().layers(), stamps));
  }
  std::uint64_t PoolBytes() { return world_.tenant().pool().used_bytes(); }
  std::uint64_t DirectoryBytes() { return world_.tenant().directory().pool().used_bytes(); }

  World world_{World::Options{.ring_tiles = 4}};
  std::optional<TestWorker> worker_{std::in_place, world_.tenant(), world_.OpenSession()};
  std::shared_ptr<const Model> small_ = world_.Register(SmallModel("small", 1, 1));
  std::shared_ptr<const Model> mixed_ =
      world_.Register(MixedModel("mixed", kernels::ElementType::kBf16));
};

// ---- Segments

TEST_F(SequenceTest, AChunkLongerThanASegmentIsSplitAndStaysWhole) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = NewStamps(kMaxSegmentEntries + 100);
  ASSERT_EQ(*AppendAll(*sequence, 0, stamps), stamps.size());
  EXPECT_EQ(sequence->Describe(true).lanes[0].segments, 2u);
  EXPECT_EQ(Shown(*sequence, stamps), "");

  // Continues past the second segment's end, by appending and by absorbing.
  const Stamps more = NewStamps(kMaxSegmentEntries - 150);
  ASSERT_TRUE(AppendAll(*sequence, stamps.size(), more).ok());
  stamps.insert(stamps.end(), more.begin(), more.end());
  const TestWorker::OpenTail tail = *worker_->Open(*sequence);
  for (std::uint64_t stamp : NewStamps(100)) {
    worker_->Write(*sequence, tail, stamps.size(), stamp);
    stamps.push_back(stamp);
  }
  worker_->Commit(tail, stamps.size());
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 82u);  // 50 that the segment still takes, and one tile
  EXPECT_EQ(sequence->Describe(true).lanes[0].segments, 3u);
  EXPECT_EQ(Shown(*sequence, stamps), "");

  // A cut inside the first segment frees the others.
  ASSERT_TRUE(sequence->Truncate(kMaxSegmentEntries - 1).ok());
  stamps.resize(kMaxSegmentEntries - 1);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(sequence->Describe(true).lanes[0].segments, 1u);
}

TEST_F(SequenceTest, ThreeSegmentsInOneChunk) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  const Stamps stamps = NewStamps(2 * kMaxSegmentEntries + 1);
  ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
  EXPECT_EQ(sequence->Describe(true).lanes[0].segments, 3u);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

// `step_begin` marks the newest decoded tokens, which may be drafts, for a policy that is set
// meanwhile. Tokens appended after them or in their place move it.
TEST_F(SequenceTest, KnowsWhereTheNewestStepBegins) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  std::uint64_t tokens = 0;
  const auto append = [&](std::uint64_t count, bool decoded) {
    const Stamps stamps = NewStamps(count);
    ASSERT_TRUE(sequence
                    ->Append({.layers = small_->layers(),
                              .first_token = tokens,
                              .tokens = count,
                              .decoded = decoded},
                             StampedRows(small_->layout(), stamps))
                    .ok());
    tokens += count;
  };
  append(100, false);
  EXPECT_EQ(sequence->step_begin(), 100u);
  append(8, true);
  EXPECT_EQ(sequence->step_begin(), 100u);
  const auto fork = world_.tenant().Fork(worker_->session(), sequence->id());
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ((*fork)->step_begin(), 100u);
  ASSERT_TRUE(sequence->Truncate(tokens = 90).ok());
  EXPECT_EQ(sequence->step_begin(), 90u);
  append(17, false);
  EXPECT_EQ(sequence->step_begin(), 107u);
}

TEST_F(SequenceTest, ALaneThatHasTooManySegmentsIsRefusedAndServesOn) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps;
  // Settled rows: appended tokens do not join their segment.
  const Recoder settle = [](const OpenRun& run) -> absl::StatusOr<std::optional<LaneSwap>> {
    run.plain.back().segment->SealDense();
    return std::nullopt;
  };
  for (std::uint32_t i = 0; i < shm::kMaxSegments; ++i) {
    const Stamps one = NewStamps(1);
    ASSERT_TRUE(AppendAll(*sequence, stamps.size(), one).ok()) << i;
    stamps.push_back(one[0]);
    ASSERT_TRUE(sequence->Recode({.lane = 0}, settle).ok());
    ASSERT_TRUE(sequence->Truncate(stamps.size()).ok());
    const auto child = world_.tenant().Fork(worker_->session(), sequence->id());
    ASSERT_TRUE(child.ok()) << child.status();
    ASSERT_TRUE(world_.tenant().FreeSequence((*child)->id()).ok());
  }
  EXPECT_EQ(AppendAll(*sequence, stamps.size(), NewStamps(1)).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(sequence->LanesNearSegmentLimit(kCrowded), std::vector<std::uint32_t>{0});

  // Joined segments keep their rows, and remain settled.
  ASSERT_TRUE(
      sequence
          ->Recode({.lane = 0, .whole = true},
                   [&](const OpenRun& run) { return JoinShortSegments(sequence->memory(), run); })
          .ok());
  EXPECT_EQ(sequence->Describe(true).lanes[0].segments, 1u);
  EXPECT_EQ(sequence->OpenEntries(0), 0u);
  EXPECT_TRUE(sequence->LanesNearSegmentLimit(kCrowded).empty());
  EXPECT_EQ(Shown(*sequence, stamps), "");
  const Stamps more = NewStamps(1);
  ASSERT_TRUE(AppendAll(*sequence, stamps.size(), more).ok());
  stamps.push_back(more[0]);
  EXPECT_EQ(Shown(*sequence, stamps), "");
  ASSERT_TRUE(sequence->Truncate(10).ok());
  ASSERT_TRUE(AppendAll(*sequence, 10, NewStamps(1)).ok());
}

// A cut closes the last segment while a reader still uses the removed rows.
TEST_F(SequenceTest, RowsBehindACutTakeOverWhatStandsBeforeIt) {
  const auto sequence = world_.NewSequence(worker_->session(), *mixed_);
  Stamps stamps;
  const Tenant::Reader pinned(world_.tenant());
  for (std::uint32_t i = 0; i < shm::kMaxSegments + 100; ++i) {
    const Stamps two = NewStamps(2);
    ASSERT_TRUE(AppendAll(*sequence, stamps.size(), two).ok()) << i;
    stamps.push_back(two[0]);
    ASSERT_TRUE(sequence->Truncate(stamps.size()).ok());
  }
  EXPECT_LE(sequence->Describe(true).lanes[0].segments, 32u);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

TEST_F(SequenceTest, ForksAndTruncationsThatAreOverCostNoSegments) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps;
  for (int round = 0; round < 300; ++round) {
    const Stamps three = NewStamps(3);
    ASSERT_TRUE(AppendAll(*sequence, stamps.size(), three).ok()) << round;
    stamps.insert(stamps.end(), three.begin(), three.end());
    if (round % 2 == 0) {
      const auto child = world_.tenant().Fork(worker_->session(), sequence->id());
      ASSERT_TRUE(child.ok()) << child.status();
      ASSERT_TRUE(world_.tenant().FreeSequence((*child)->id()).ok());
    } else {
      stamps.pop_back();
      ASSERT_TRUE(sequence->Truncate(stamps.size()).ok());
    }
    world_.tenant().epochs().Collect();
  }
  EXPECT_EQ(Shown(*sequence, stamps), "");
  EXPECT_EQ(sequence->Describe(/*lanes=*/true).lanes.front().segments, 1u);
}

TEST_F(SequenceTest, WhatAReaderMaySeeIsNotOverwrittenAfterATruncation) {
  const auto sequence = world_.NewSequence(worker_->session(), *small_);
  const Stamps before = NewStamps(40);
  ASSERT_TRUE(AppendAll(*sequence, 0, before).ok());
  std::optional<Tenant::Reader> pinned(std::in_place, world_.tenant());
  const SequenceView seen = *ReadSequence(world_.tenant(), *sequence);
  ASSERT_TRUE(sequence->Truncate(10).ok());
  Stamps after(before.begin(), before.begin() + 10);
  for (int i = 0; i < 2; ++i) {
    const Stamps more = NewStamps(5);
    ASSERT_TRUE(AppendAll(*sequence, after.size(), more).ok());
    after.insert(after.end(), more.begin(), more.end());
    // Rows of the partial tile are copied too.
    EXPECT_EQ(sequence->Describe(/*lanes=*/true).lanes.front().segments, 1u);
  }
  EXPECT_EQ(Shown(*sequence, after), "");
  EXPECT_EQ(Differs(seen, *small_, {before}), "");
}

TEST_F(SequenceTest, AppendingNothingChangesNothing) {
  const auto sequence = world_.NewSequence(worker_->session(), *mixed_);
  EXPECT_EQ(*AppendAll(*sequence, 0, {}), 0u);
  EXPECT_EQ(Shown(*sequence, Stamps{}), "");
  const Stamps stamps = NewStamps(5);
  ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
  EXPECT_EQ(*AppendAll(*sequence, 5, {}), 5u);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

// A source that another process may write is read exactly once, by the device: a second read could
// differ from the checked bytes.
TEST_F(SequenceTest, EveryRowOfASourceIsAskedForExactlyOnce) {
  class CountingRows final : public RowSource {
   public:
    explicit CountingRows(const StampedRows& rows) : rows_(rows) {}
    device::Place place() const override { return rows_.place(); }
    RowSpan At(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
               std::uint32_t count) const override {
      for (std::uint32_t i = 0; i < count; ++i) ++copies[{layer, kv_head, first + i}];
      return rows_.At(layer, kv_head, first, count);
    }
    mutable std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>, int> copies;

   private:
    const StampedRows& rows_;
  };
  const auto sequence = world_.NewSequence(worker_->session(), *mixed_);
  std::uint64_t held = 0;
  for (std::uint64_t tokens : {7u, 100u, 32u, 500u}) {
    const StampedRows rows(mixed_->layout(), NewStamps(tokens));
    const CountingRows counting(rows);
    ASSERT_TRUE(sequence->Append({0, mixed_->layers(), held, tokens}, counting).ok());
    EXPECT_EQ(counting.copies.size(), tokens * mixed_->lanes());
    for (const auto& [row, copies] : counting.copies) ASSERT_EQ(copies, 1);
    held += tokens;
  }
}

// ---- Lanes of different lengths

TEST_F(SequenceTest, ALayerThatIsAheadIsCutByForkAndTruncateAndBarsDecoding) {
  const auto sequence = world_.NewSequence(worker_->session(), *mixed_);
  const Stamps stamps = NewStamps(90);
  const StampedRows rows(mixed_->layout(), stamps);
  EXPECT_EQ(*sequence->Append({0, 1, 0, 90}, rows), 0u);
  const auto part = [&](std::uint64_t n) {
    return Stamps(stamps.begin(), stamps.begin() + static_cast<std::ptrdiff_t>(n));
  };
  const StampedRows some(mixed_->layout(), part(40));
  EXPECT_EQ(*sequence->Append({1, 2, 0, 40}, some), 40u);
  EXPECT_EQ(Shown(*sequence, {stamps, part(40), part(40)}), "");

  const absl::Status refused = worker_->Open(*sequence).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.ToString().find("layer 0"), std::string::npos) << refused;
  EXPECT_NE(refused.ToString().find("90"), std::string::npos) << refused;
  EXPECT_NE(refused.ToString().find("40"), std::string::npos) << refused;

  const auto child = *world_.tenant().Fork(worker_->session(), sequence->id());
  EXPECT_EQ(Shown(*child, part(40)), "");
  EXPECT_TRUE(worker_->Open(*child).ok());
  EXPECT_EQ(Shown(*sequence, {stamps, part(40), part(40)}), "");

  EXPECT_EQ(sequence->Truncate(41).code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(sequence->Truncate(35).ok());
  EXPECT_EQ(Shown(*sequence, part(35)), "");
  EXPECT_TRUE(worker_->Open(*sequence).ok());
}

// ---- Forks

TEST_F(SequenceTest, AForkSharesTilesAndCostsSegmentsNotTokens) {
  const auto parent = world_.NewSequence(worker_->session(), *mixed_);
  std::uint64_t directory_bytes = 0;
  for (std::uint64_t tokens : {100u, 3000u}) {
    const std::uint64_t held = parent->Describe(false).tokens;
    ASSERT_TRUE(AppendAll(*parent, held, NewStamps(tokens)).ok());
    const std::uint64_t pool_before = PoolBytes();
    const std::uint64_t directory_before = DirectoryBytes();
    const auto child = *world_.tenant().Fork(worker_->session(), parent->id());
    EXPECT_EQ(PoolBytes(), pool_before);
    const std::uint64_t cost = DirectoryBytes() - directory_before;
    // One block, and one snapshot per lane, for any number of tokens.
    if (directory_bytes != 0) {
      EXPECT_LE(cost, directory_bytes + 64 * mixed_->lanes());
    }
    directory_bytes = cost;
    EXPECT_EQ(child->Describe(false).tile_bytes, child->Describe(false).shared_tile_bytes);
    ASSERT_TRUE(world_.tenant().FreeSequence(child->id()).ok());
    EXPECT_EQ(PoolBytes(), pool_before);
  }
}

TEST_F(SequenceTest, AForkOfADecodingSequenceCopiesTheTailAlone) {
  const auto parent = world_.NewSequence(worker_->session(), *small_);
  Stamps stamps = NewStamps(1000);
  ASSERT_TRUE(AppendAll(*parent, 0, stamps).ok());
  const TestWorker::OpenTail tail = *worker_->Open(*parent);
  for (std::uint64_t stamp : NewStamps(45)) {
    worker_->Write(*parent, tail, stamps.size(), stamp);
    stamps.push_back(stamp);
  }
  worker_->Write(*parent, tail, stamps.size(), 424242);  // not committed
  worker_->Commit(tail, stamps.size());
  const std::uint64_t before = PoolBytes();
  const auto child = *world_.tenant().Fork(worker_->session(), parent->id());
  EXPECT_EQ(PoolBytes() - before, 2 * small_->layout().tile(0).bytes() + 64);  // and their table
  EXPECT_EQ(Shown(*child, stamps), "");
  EXPECT_TRUE(parent->decoding());
  EXPECT_FALSE(child->decoding());
  EXPECT_EQ(Shown(*parent, stamps), "");
}

TEST_F(SequenceTest, WhatComesAfterAForkIsEachOnesOwn) {
  const auto parent = world_.NewSequence(worker_->session(), *mixed_);
  const Stamps common = NewStamps(50);
  ASSERT_TRUE(AppendAll(*parent, 0, common).ok());
  std::vector<std::shared_ptr<Sequence>> family = {parent};
  std::vector<Stamps> held = {common};
  for (int i = 0; i < 5; ++i) {
    family.push_back(*world_.tenant().Fork(worker_->session(), parent->id()));
    held.push_back(common);
  }
  for (std::size_t i = 0; i < family.size(); ++i) {
    const Stamps own = NewStamps(3 + 20 * i);
    ASSERT_TRUE(AppendAll(*family[i], 50, own).ok());
    held[i].insert(held[i].end(), own.begin(), own.end());
  }
  for (std::size_t i = 0; i < family.size(); ++i) EXPECT_EQ(Shown(*family[i], held[i]), "");
  // Tiles live until the last sequence that shares them is freed.
  for (std::size_t i = 0; i + 1 < family.size(); ++i) {
    ASSERT_TRUE(world_.tenant().FreeSequence(family[i]->id()).ok());
    for (std::size_t j = i + 1; j < family.size(); ++j) {
      ASSERT_EQ(Shown(*family[j], held[j]), "");
    }
  }
}

// ---- The sequence block that workers read

TEST_F(SequenceTest, TheVersionMovesWithEveryPublication) {
  const auto sequence = world_.NewSequence(worker_->session(), *mixed_);
  const shm::SequenceBlock& block = worker_->Block(*sequence);
  EXPECT_EQ(block.lanes, mixed_->lanes());
  EXPECT_EQ(block.layers, mixed_->layers());
  std::uint64_t version = block.version.load();
  const auto moved = [&] { return std::exchange(version, block.version.load()) != version; };
  ASSERT_TRUE(AppendAll(*sequence, 0, NewStamps(40)).ok());
  EXPECT_TRUE(moved());
  EXPECT_EQ(block.next_position.load(), 40u);
  const TestWorker::OpenTail tail = *worker_->Open(*sequence);
  EXPECT_TRUE(moved());
  EXPECT_EQ(block.tail_generation.load(), tail.place.tail.generation);
  for (std::uint64_t i = 0; i < 40; ++i) worker_->Write(*sequence, tail, 40 + i, 1);
  worker_->Commit(tail, 80);
  EXPECT_FALSE(moved());
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 24u);
  EXPECT_TRUE(moved());
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 0u);
  EXPECT_FALSE(moved());
  ASSERT_TRUE(sequence->CloseTail().ok());
  EXPECT_TRUE(moved());
  EXPECT_EQ(block.tail_generation.load(), 0u);
  EXPECT_EQ(block.next_position.load(), 80u);
  ASSERT_TRUE(sequence->Truncate(10).ok());
  EXPECT_TRUE(moved());
  EXPECT_EQ(block.next_position.load(), 10u);
  ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
  EXPECT_TRUE(moved());
  EXPECT_EQ(block.state.load(), shm::kSequenceGone);
  EXPECT_EQ(block.sequence_id.load(), 0u);
}

TEST_F(SequenceTest, AFreedSequenceStaysReadableForWhoeverIsPinned) {
  const auto sequence = world_.NewSequence(worker_->session(), *mixed_);
  const Stamps stamps = NewStamps(70);
  ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
  shm::Word& slot = worker_->session().control()->page().readers[5].word;
  const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
  const SequenceView view = *ReadSequence(world_.tenant(), *sequence);
  const std::uint64_t before = PoolBytes();
  ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
  EXPECT_EQ(PoolBytes(), before);
  EXPECT_GE(world_.tenant().epochs().waiting_bytes(), before);
  EXPECT_GT(world_.attention(), 0);
  const auto other = world_.NewSequence(worker_->session(), *mixed_);
  ASSERT_TRUE(AppendAll(*other, 0, NewStamps(200)).ok());
  EXPECT_EQ(Differs(view, *mixed_, std::vector<Stamps>(3, stamps)), "");
  EXPECT_TRUE(shm::Unpin(slot, pin));
  world_.tenant().epochs().Collect();
  ASSERT_TRUE(world_.tenant().FreeSequence(other->id()).ok());
  EXPECT_EQ(PoolBytes(), 0u);
}

}  // namespace
}  // namespace tessera::cache
