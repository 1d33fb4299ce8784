// Lets each allocation of an operation fail in turn. The operation must return RESOURCE_EXHAUSTED
// and change nothing.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/faulty_extents.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

using Stamps = std::vector<std::uint64_t>;

constexpr std::uint64_t kLimit = 4 * 1024 * 1024;

class Exhaustion : public testing::Test {
 protected:
  // Leaves exactly `bytes` of the tenant's quota free while the result lives. Casts away const,
  // since tests have no access to the account. Uses a tag that tenants do not use.
  pool::Charge Squeeze(std::uint64_t bytes) {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    return *account.Reserve(pool::MemoryTag::kPoolExtents, kLimit - account.used_bytes() - bytes);
  }

  // Retries the operation with more and more room until it succeeds. Returns the number of
  // different places at which it was refused, told apart by their messages.
  int Sweep(const std::function<absl::Status()>& operation) {
    std::map<std::string, int> refusals;
    for (std::uint64_t room = 0; room < kLimit; room += 64) {
      world_.tenant().epochs().Collect();
      const std::uint64_t used = world_.tenant().account().used_bytes();
      absl::Status status;
      {
        const pool::Charge rest = Squeeze(room);
        status = operation();
      }
      world_.tenant().epochs().Collect();
      world_.Validate();
      if (status.ok()) return static_cast<int>(refusals.size());
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
      EXPECT_NE(status.ToString().find("requested"), std::string::npos) << status;
      EXPECT_EQ(world_.tenant().account().used_bytes(), used) << status << " with room " << room;
      EXPECT_EQ(Shown(), "") << status << " with room " << room;
      if (HasFailure()) return -1;
      ++refusals[status.ToString().substr(0, status.ToString().find(" used of"))];
    }
    ADD_FAILURE() << "it never worked";
    return -1;
  }

  std::string Shown() {
    for (const auto& [sequence, stamps] : shown_) {
      const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), *sequence);
      if (!view.ok()) return view.status().ToString();
      const std::string wrong = Differs(*view, *model_, std::vector<Stamps>(2, stamps));
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

  std::shared_ptr<Sequence> Filled(std::uint64_t tokens) {
    std::shared_ptr<Sequence> sequence = world_.NewSequence(worker_->session(), *model_);
    Stamps& stamps = shown_[sequence];
    stamps = NewStamps(tokens);
    if (tokens > 0) {
      EXPECT_TRUE(AppendAll(*sequence, 0, stamps).ok());
    }
    return sequence;
  }
  // Writes and commits `tokens` through a tail.
  void Decoded(const std::shared_ptr<Sequence>& sequence, std::uint64_t tokens) {
    Stamps& stamps = shown_[sequence];
    const TestWorker::OpenTail tail = *worker_->Open(*sequence);
    for (std::uint64_t stamp : NewStamps(tokens)) {
      worker_->Write(*sequence, tail, stamps.size(), stamp);
      stamps.push_back(stamp);
    }
    worker_->Commit(tail, stamps.size());
    EXPECT_EQ(Shown(), "");
  }
  // Runs after the body, whose sequences are gone then.
  void TearDown() override {
    shown_.clear();
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_.ExpectBaseline();
  }

  FaultyDevice device_;
  FaultyExtents& extents_ = device_.extents;
  World world_{World::Options{.tenant_limit = kLimit, .ring_tiles = 4, .device = &device_}};
  std::shared_ptr<const Model> model_ = world_.Register(SmallModel("two", 2, 1));
  std::optional<TestWorker> worker_{std::in_place, world_.tenant(), world_.OpenSession()};
  std::map<std::shared_ptr<Sequence>, Stamps> shown_;
};

TEST_F(Exhaustion, OfCreate) {
  EXPECT_GE(Sweep([&] {
              return world_.tenant().CreateSequence(worker_->session(), model_->id()).status();
            }),
            1);
  EXPECT_EQ(world_.tenant().sequence_count(), 1u);
}

TEST_F(Exhaustion, OfAppendToAnEmptySequence) {
  const auto sequence = Filled(0);
  const Stamps stamps = NewStamps(70);
  EXPECT_GE(Sweep([&] { return AppendAll(*sequence, 0, stamps).status(); }), 3);
  shown_[sequence] = stamps;
  EXPECT_EQ(Shown(), "");
}

// The last tile has room; then the rest exceeds the tile table.
TEST_F(Exhaustion, OfAppendToAnOpenSegment) {
  const auto sequence = Filled(8 * 32 - 5);
  const Stamps stamps = NewStamps(40);
  EXPECT_GE(Sweep([&] { return AppendAll(*sequence, 8 * 32 - 5, stamps).status(); }), 3);
  shown_[sequence].insert(shown_[sequence].end(), stamps.begin(), stamps.end());
  EXPECT_EQ(Shown(), "");
}

TEST_F(Exhaustion, OfForkWithATail) {
  const auto parent = Filled(50);
  Decoded(parent, 40);
  std::shared_ptr<Sequence> child;
  EXPECT_GE(Sweep([&] {
              auto forked = world_.tenant().Fork(worker_->session(), parent->id());
              if (forked.ok()) child = *forked;
              return forked.status();
            }),
            4);
  shown_[child] = shown_[parent];
  EXPECT_EQ(Shown(), "");
  EXPECT_TRUE(parent->decoding());
}

// A failed fork does not freeze its parent: the open segment continues to fill.
TEST_F(Exhaustion, OfForkLeavesTheParentsOpenSegmentOpen) {
  const auto parent = Filled(50);
  Decoded(parent, 10);
  {
    // Enough for the child's block and first snapshots, but not for the tile that the tail needs.
    const pool::Charge rest = Squeeze(1024);
    EXPECT_EQ(world_.tenant().Fork(worker_->session(), parent->id()).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
  ASSERT_TRUE(world_.tenant().CloseTails(worker_->session(), {parent->id()}).ok());
  for (const Sequence::LaneDescription& lane : parent->Describe(true).lanes) {
    EXPECT_EQ(lane.segments, 1u);
  }
}

TEST_F(Exhaustion, OfTruncate) {
  const auto sequence = Filled(100);
  EXPECT_GE(Sweep([&] { return sequence->Truncate(33); }), 1);
  shown_[sequence].resize(33);
  EXPECT_EQ(Shown(), "");
}

TEST_F(Exhaustion, OfTruncateLeavesTheTailOpen) {
  const auto sequence = Filled(100);
  Decoded(sequence, 60);
  EXPECT_GE(Sweep([&] {
              const absl::Status status = sequence->Truncate(120);
              EXPECT_EQ(sequence->decoding(), !status.ok());
              return status;
            }),
            2);
  shown_[sequence].resize(120);
  EXPECT_EQ(Shown(), "");
}

TEST_F(Exhaustion, OfOpeningATail) {
  const auto sequence = Filled(10);
  EXPECT_GE(Sweep([&] { return worker_->Open(*sequence).status(); }), 1);
  EXPECT_TRUE(sequence->decoding());
}

TEST_F(Exhaustion, OfAbsorbing) {
  const auto sequence = Filled(20);
  Decoded(sequence, 70);
  EXPECT_GE(Sweep([&] { return sequence->AbsorbFullTiles().status(); }), 2);
  EXPECT_TRUE(sequence->decoding());
  EXPECT_EQ(worker_->Block(*sequence).ring_start.load(), 64u);
  EXPECT_EQ(Shown(), "");
}

TEST_F(Exhaustion, OfClosingATail) {
  const auto sequence = Filled(20);
  Decoded(sequence, 70);
  EXPECT_GE(Sweep([&] {
              const absl::Status status =
                  world_.tenant().CloseTails(worker_->session(), {sequence->id()}).status();
              EXPECT_EQ(sequence->decoding(), !status.ok());
              return status;
            }),
            2);
  EXPECT_EQ(Shown(), "");
}

TEST_F(Exhaustion, OfHandingOver) {
  const auto sequence = Filled(20);
  const auto other = world_.OpenSession();
  Decoded(sequence, 30);
  EXPECT_GE(Sweep([&] {
              return world_.tenant().Handover(sequence->id(), worker_->session(), other->id());
            }),
            2);
  EXPECT_EQ(sequence->owner(), other->id());
  world_.tenant().EndSession(other->id());
}

// Opens all tails of a batch or none.
TEST_F(Exhaustion, OfOpeningManyTails) {
  std::vector<SequenceId> ids;
  std::vector<std::shared_ptr<Sequence>> sequences;
  for (int i = 0; i < 6; ++i) {
    sequences.push_back(Filled(5));
    ids.push_back(sequences.back()->id());
  }
  // An extent holds one region: 2 layers x 4 tiles x 8 KiB. One idle extent is always kept, so it
  // exists from the start.
  ASSERT_TRUE(worker_->Open(*sequences[0]).ok());
  ASSERT_TRUE(world_.tenant().CloseTails(worker_->session(), {ids[0]}).ok());
  EXPECT_GE(Sweep([&] {
              const auto places = world_.tenant().OpenTails(worker_->session(), ids);
              for (const auto& sequence : sequences) {
                EXPECT_EQ(sequence->decoding(), places.ok());
              }
              (void)worker_->session().tails().ReleaseIdle();
              return places.status();
            }),
            1);
}

TEST_F(Exhaustion, OfTheDeviceAtEachExtent) {
  const auto sequence = Filled(40);
  const Stamps stamps = NewStamps(5000);  // 157 tiles of 8 KiB in each lane: three extents
  for (std::uint64_t allowed = 0;; ++allowed) {
    extents_.Allow(allowed);
    const std::uint64_t used = world_.tenant().account().used_bytes();
    const absl::StatusOr<std::uint64_t> appended = AppendAll(*sequence, 40, stamps);
    world_.tenant().epochs().Collect();
    world_.Validate();
    if (appended.ok()) {
      EXPECT_GE(allowed, 2u);
      break;
    }
    EXPECT_EQ(appended.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(world_.tenant().account().used_bytes(), used);
    EXPECT_EQ(Shown(), "");
    ASSERT_LT(allowed, 10u);
  }
  shown_[sequence].insert(shown_[sequence].end(), stamps.begin(), stamps.end());
  EXPECT_EQ(Shown(), "");
}

}  // namespace
}  // namespace tessera::cache
