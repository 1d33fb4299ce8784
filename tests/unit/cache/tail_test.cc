#include "daemon/cache/tail/tail.h"

#include <sys/mman.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

using Stamps = std::vector<std::uint64_t>;

// ---- Memory of rings

class TailMemoryTest : public testing::Test {
 protected:
  std::shared_ptr<TailMemory> Make() {
    return TailMemory::Create(
        {.device = &device_, .extent_bytes = kExtent, .node = &node_, .tenant = &tenant_});
  }
  static constexpr std::uint64_t kExtent = 64 * 1024;
  device::CpuDevice device_{kernels::BestImplementation()};
  pool::Account node_{"node", 8 * kExtent};
  pool::Account tenant_{"tenant", 6 * kExtent};
};

TEST_F(TailMemoryTest, RegionsNeverOverlapAndKeepTheirWorkersBytes) {
  TestRandom random;
  std::shared_ptr<TailMemory> memory = Make();
  struct Live {
    TailRegion region;
    std::uint64_t bytes;
  };
  std::vector<Live> live;
  static constexpr std::uint64_t kSizes[] = {4096, 8192, 8192 + 64, 64 * 1024, 100 * 1024};
  for (int step = 0; step < 2000; ++step) {
    if (random.OneIn(2)) {
      const std::uint64_t bytes = random.Pick(kSizes);
      absl::StatusOr<TailRegion> region = memory->Allocate(bytes);
      if (!region.ok()) {
        ASSERT_EQ(region.status().code(), absl::StatusCode::kResourceExhausted);
        continue;
      }
      ASSERT_LE(region->offset() + bytes, region->extent_bytes());
      ASSERT_EQ(region->offset() % 64, 0u);
      live.push_back({*std::move(region), bytes});
    } else if (!live.empty()) {
      std::swap(random.Pick(live), live.back());
      live.pop_back();
    }
    if (random.OneIn(10)) (void)memory->ReleaseIdle();
    std::map<std::pair<std::uint32_t, std::uint64_t>, std::uint64_t> places;
    for (const Live& each : live) {
      const auto place = std::make_pair(each.region.extent(), each.region.offset());
      ASSERT_TRUE(places.emplace(place, each.bytes).second);
    }
    std::uint32_t extent = ~0u;
    std::uint64_t end = 0;
    for (const auto& [place, bytes] : places) {
      if (place.first != extent) end = 0;
      ASSERT_GE(place.second, end);
      extent = place.first;
      end = place.second + bytes;
    }
    ASSERT_EQ(node_.used_bytes(), tenant_.used_bytes());
  }
  live.clear();
  (void)memory->ReleaseIdle();
  EXPECT_EQ(memory->extents(), 1u);
  memory.reset();
  EXPECT_EQ(node_.used_bytes(), 0u);
}

TEST_F(TailMemoryTest, ARegionKeepsTheMemoryAliveBeyondItsOwner) {
  std::shared_ptr<TailMemory> memory = Make();
  TailRegion region = *memory->Allocate(4096);
  memory.reset();
  EXPECT_EQ(region.data()[4095], std::byte{0});
  EXPECT_EQ(tenant_.used_bytes(), kExtent);
  region.Reset();
  EXPECT_EQ(tenant_.used_bytes(), 0u);
}

TEST_F(TailMemoryTest, AnIdleExtentIsCutAnewForRingsOfAnotherSize) {
  std::shared_ptr<TailMemory> memory = Make();
  TailRegion small = *memory->Allocate(4096);
  TailRegion other = *memory->Allocate(kExtent / 2);
  EXPECT_EQ(memory->extents(), 2u);
  small.Reset();
  TailRegion third = *memory->Allocate(kExtent);  // in the place of the small ones
  EXPECT_EQ(memory->extents(), 2u);
  EXPECT_NE(third.extent(), other.extent());
  EXPECT_EQ(third.offset(), 0u);
  third.Reset();
  std::vector<TailRegion> many;
  for (int i = 0; i < 16; ++i) many.push_back(*memory->Allocate(4096));
  EXPECT_EQ(memory->extents(), 2u);
}

TEST_F(TailMemoryTest, TheWorkersWritesShowAndTheDaemonCannotWrite) {
  std::shared_ptr<TailMemory> memory = Make();
  TailRegion region = *memory->Allocate(8192);
  const absl::StatusOr<device::Export> share = memory->Share(region.extent());
  ASSERT_TRUE(share.ok()) << share.status();
  EXPECT_EQ(share->bytes, region.extent_bytes());
  absl::StatusOr<AddressRange> worker =
      AddressRange::Map(share->fd.get(), share->bytes, Access::kReadWrite);
  ASSERT_TRUE(worker.ok());
  worker->data()[region.offset() + 17] = std::byte{99};
  EXPECT_EQ(region.data()[17], std::byte{99});
  for (std::uint32_t index : {1u, 1000u, 0xffffffffu}) {
    EXPECT_EQ(memory->Share(index).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(TailMemoryTest, BothAccountsRefuseAndNothingIsLeft) {
  std::shared_ptr<TailMemory> memory = Make();
  std::vector<TailRegion> regions;
  for (int i = 0; i < 6; ++i) regions.push_back(*memory->Allocate(kExtent));
  absl::StatusOr<TailRegion> refused = memory->Allocate(kExtent);
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().ToString().find("tenant"), std::string::npos) << refused.status();
  EXPECT_EQ(node_.used_bytes(), 6 * kExtent);
  absl::StatusOr<pool::Charge> others = node_.Reserve(pool::MemoryTag::kPoolExtents, 2 * kExtent);
  ASSERT_TRUE(others.ok());
  regions.pop_back();
  (void)memory->ReleaseIdle();  // one idle extent is kept
  EXPECT_TRUE(memory->Allocate(kExtent).ok());
  EXPECT_EQ(memory->extents(), 6u);
}

// ---- Committed counts

class TailTest : public testing::Test {
 protected:
  void TearDown() override {
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_.ExpectBaseline();
  }
  // A sequence of `held` tokens with an open tail. `stamps` continues it.
  std::shared_ptr<Sequence> Decoding(std::uint64_t held, Stamps& stamps) {
    const auto sequence = world_.NewSequence(worker_->session(), *model_);
    stamps = NewStamps(held);
    EXPECT_TRUE(AppendAll(*sequence, 0, stamps).ok());
    tail_ = *worker_->Open(*sequence);
    return sequence;
  }
  void Write(const Sequence& sequence, Stamps& stamps, std::uint64_t tokens) {
    for (std::uint64_t stamp : NewStamps(tokens)) {
      worker_->Write(sequence, tail_, stamps.size(), stamp);
      stamps.push_back(stamp);
    }
  }
  std::string Shown(const Sequence& sequence, const Stamps& stamps) {
    const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), sequence);
    return view.ok() ? Differs(*view, *model_, std::vector<Stamps>(2, stamps))
                     : view.status().ToString();
  }

  World world_{World::Options{.ring_tiles = 4}};  // 128 tokens
  std::optional<TestWorker> worker_{std::in_place, world_.tenant(), world_.OpenSession()};
  std::shared_ptr<const Model> model_ = world_.Register(SmallModel("small", 2, 1));
  TestWorker::OpenTail tail_{};
};

TEST_F(TailTest, ImpossibleCountsFailTheSequenceWithTheBounds) {
  TestRandom random;
  for (std::uint64_t count :
       {std::uint64_t{0}, std::uint64_t{49}, std::uint64_t{50 + 129}, random.Below(50),
        179 + random.Below(1000), shm::CommitWord::kTokenMask}) {
    Stamps stamps;
    const auto sequence = Decoding(50, stamps);
    worker_->Commit(tail_, count);
    absl::Status status;
    switch (random.Below(4)) {
      case 0:
        status = sequence->AbsorbFullTiles().status();
        break;
      case 1:
        status = sequence->Fork(SequenceId(7), SessionId(1)).status();
        break;
      case 2:
        status = sequence->Truncate(0);
        break;
      default:
        status = world_.tenant().CloseTails(worker_->session(), {sequence->id()}).status();
    }
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << count << ": " << status;
    const std::string text = status.ToString();
    for (const std::string& part : {std::to_string(count), std::string("between 50 and 178")}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
    }
    EXPECT_TRUE(sequence->failed());
    EXPECT_EQ(Shown(*sequence, stamps), "");
    EXPECT_EQ(sequence->Describe(false).tokens, 50u);
    EXPECT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
  }
}

TEST_F(TailTest, CountsAtTheBordersAreTaken) {
  Stamps stamps;
  const auto sequence = Decoding(50, stamps);
  worker_->Commit(tail_, 50);  // nothing yet
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 0u);
  Write(*sequence, stamps, 128);  // fills the ring
  worker_->Commit(tail_, 178);
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 110u);  // to token 160, the end of a tile
  EXPECT_EQ(Shown(*sequence, stamps), "");
  worker_->Commit(tail_, 159);  // now too small
  EXPECT_EQ(sequence->AbsorbFullTiles().status().code(), absl::StatusCode::kDataLoss);
}

// A prompt's last tile is filled first, so that the rest lies in one tile of the ring.
TEST_F(TailTest, TilesAreFilledNotOnlyCounted) {
  Stamps stamps;
  const auto sequence = Decoding(50, stamps);
  const auto absorbed_at = [&](std::uint64_t tokens) {
    Write(*sequence, stamps, tokens - stamps.size());
    worker_->Commit(tail_, tokens);
    const std::uint64_t moved = *sequence->AbsorbFullTiles();
    EXPECT_EQ(Shown(*sequence, stamps), "");
    return moved;
  };
  EXPECT_EQ(absorbed_at(63), 0u);
  EXPECT_EQ(absorbed_at(64), 14u);
  EXPECT_EQ(absorbed_at(95), 0u);
  EXPECT_EQ(absorbed_at(130), 64u);
  EXPECT_EQ(absorbed_at(160), 32u);
}

TEST_F(TailTest, ACountOfAnotherGenerationIsNone) {
  Stamps stamps;
  const auto sequence = Decoding(50, stamps);
  const std::uint32_t generation = tail_.place.tail.generation;
  for (std::uint32_t other : {0u, generation - 1, generation + 1, 0xffffu}) {
    if ((other & 0xffff) == (generation & 0xffff)) continue;
    worker_->Commit(tail_, other, 100);
    EXPECT_EQ(*sequence->AbsorbFullTiles(), 0u);
    EXPECT_EQ(Shown(*sequence, stamps), "");
  }
  EXPECT_FALSE(sequence->failed());
}

TEST_F(TailTest, EveryTailHasAGenerationOfItsOwn) {
  Stamps stamps;
  const auto sequence = Decoding(3, stamps);
  std::uint32_t last = tail_.place.tail.generation;
  EXPECT_NE(last & 0xffff, 0u);
  // Wraps the 16 bits that the commit word holds.
  for (int i = 0; i < 70000; ++i) {
    tail_ = *worker_->Open(*sequence);
    ASSERT_GT(tail_.place.tail.generation, last);
    last = tail_.place.tail.generation;
    ASSERT_NE(last & 0xffff, 0u);
  }
  Write(*sequence, stamps, 2);
  worker_->Commit(tail_, 5);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

// ---- Ring space

TEST_F(TailTest, RingSpaceIsGivenBackWhenReadersHaveMovedOn) {
  Stamps stamps;
  const auto sequence = Decoding(0, stamps);
  Write(*sequence, stamps, 64);
  worker_->Commit(tail_, 64);
  shm::Word& slot = worker_->session().control()->page().readers[0].word;
  const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
  const SequenceView view = *ReadSequence(world_.tenant(), *sequence);
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 64u);
  EXPECT_EQ(worker_->Block(*sequence).ring_start.load(), 0u);
  EXPECT_FALSE(worker_->HasRoom(*sequence, 128));
  Write(*sequence, stamps, 64);
  worker_->Commit(tail_, 128);
  const Stamps before(stamps.begin(), stamps.begin() + 64);
  EXPECT_EQ(Differs(view, *model_, std::vector<Stamps>(2, before)), "");
  EXPECT_TRUE(shm::Unpin(slot, pin));
  world_.tenant().epochs().Collect();
  EXPECT_EQ(worker_->Block(*sequence).ring_start.load(), 64u);
  EXPECT_TRUE(worker_->HasRoom(*sequence, 191));
  EXPECT_FALSE(worker_->HasRoom(*sequence, 192));
}

TEST_F(TailTest, ASpaceThatIsGivenBackLateDoesNotMoveTheNextTail) {
  Stamps stamps;
  const auto sequence = Decoding(0, stamps);
  Write(*sequence, stamps, 100);
  worker_->Commit(tail_, 100);
  shm::Word& slot = worker_->session().control()->page().readers[0].word;
  const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
  EXPECT_EQ(*sequence->AbsorbFullTiles(), 96u);
  ASSERT_TRUE(sequence->Truncate(10).ok());  // closes the tail, whose ring space is still held
  stamps.resize(10);
  tail_ = *worker_->Open(*sequence);
  EXPECT_EQ(tail_.place.tail.tokens, 10u);
  EXPECT_EQ(worker_->Block(*sequence).ring_start.load(), 10u);
  EXPECT_TRUE(shm::Unpin(slot, pin));
  world_.tenant().epochs().Collect();
  EXPECT_EQ(worker_->Block(*sequence).ring_start.load(), 10u);  // 96 belonged to the old ring
  Write(*sequence, stamps, 40);
  worker_->Commit(tail_, 50);
  EXPECT_EQ(Shown(*sequence, stamps), "");
}

// A reader of a closed tail continues to see its rows and count, even while the same worker decodes
// something else.
TEST_F(TailTest, AClosedTailIsNobodyElsesWhileItIsRead) {
  Stamps stamps, others;
  const auto sequence = Decoding(20, stamps);
  Write(*sequence, stamps, 30);
  worker_->Commit(tail_, 50);
  shm::Word& slot = worker_->session().control()->page().readers[0].word;
  const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
  const SequenceView view = *ReadSequence(world_.tenant(), *sequence);
  ASSERT_TRUE(world_.tenant().CloseTails(worker_->session(), {sequence->id()}).ok());
  const auto other = Decoding(0, others);
  Write(*other, others, 64);
  worker_->Commit(tail_, 64);
  EXPECT_EQ(view.tail->CommittedTokens(), std::optional<std::uint64_t>(50));
  EXPECT_EQ(Differs(view, *model_, std::vector<Stamps>(2, stamps)), "");
  EXPECT_TRUE(shm::Unpin(slot, pin));
}

// Tails closed by an append or a truncation free their slot.
TEST_F(TailTest, SlotsOfTailsThatEndedByThemselvesAreUsedAgain) {
  std::vector<std::shared_ptr<Sequence>> sequences;
  std::set<std::uint32_t> slots;
  for (int i = 0; i < 50; ++i) {
    Stamps stamps;
    sequences.push_back(Decoding(3, stamps));
    slots.insert(tail_.place.tail.commit_slot);
    if (i % 2 == 0) {
      ASSERT_TRUE(AppendAll(*sequences.back(), 3, NewStamps(1)).ok());
    } else {
      ASSERT_TRUE(sequences.back()->Truncate(1).ok());
    }
    EXPECT_TRUE(worker_->session().Decoding().empty());
  }
  EXPECT_EQ(slots.size(), 1u);
}

TEST_F(TailTest, AsManyDecodeAsThereAreSlotsAndNoMore) {
  pool::Account unlimited("account", 0);
  absl::StatusOr<std::shared_ptr<Control>> control = Control::Create();
  ASSERT_TRUE(control.ok());
  std::vector<CommitSlot> slots;
  std::set<std::uint32_t> indices;
  for (std::uint32_t i = 0; i < shm::kCommitSlots; ++i) {
    slots.push_back(*(*control)->TakeCommitSlot());
    indices.insert(slots.back().index());
    (*control)->page().commits[slots.back().index()].store(7);
  }
  EXPECT_EQ(indices.size(), shm::kCommitSlots);
  const absl::StatusOr<CommitSlot> refused = (*control)->TakeCommitSlot();
  ASSERT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().ToString().find("4096"), std::string::npos);
  const std::uint32_t freed = slots[100].index();
  slots[100] = CommitSlot();
  CommitSlot again = *(*control)->TakeCommitSlot();
  EXPECT_EQ(again.index(), freed);
  EXPECT_EQ(again.Load(), 0u);  // the old count is cleared
}

}  // namespace
}  // namespace tessera::cache
