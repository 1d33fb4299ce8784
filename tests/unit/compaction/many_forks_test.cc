// Sequences that are forked at every token or tile: they continue with few segments under any
// policy, and the memory of the forks is freed with them.

#include <algorithm>
#include <cctype>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/cache/sequence/join.h"
#include "daemon/policies/grammar/parse.h"
#include "proto/shm/layout.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kTile = kernels::kTileEntries;

class ManyForks : public CompactorTest {
 protected:
  explicit ManyForks(std::uint64_t tenant_limit = 0) : CompactorTest(0, tenant_limit) {
    model_ = world_.Register(cache::SmallModel("one lane", 1, 1));
  }

  std::uint32_t SegmentsOf(const Track& track) {
    return track.sequence->Describe(true).lanes[0].segments;
  }
  std::uint64_t TileBytes() {
    const kernels::DenseTile tile = model_->layout().tile(0);
    return kernels::LayoutOf(kernels::DenseShape(tile.head_dim, tile.type)).bytes;
  }
  absl::Status DecodeByCall(Track& track, const Stamps& stamps) {
    const Compactor::Rows rows = {.layers = model_->layers(),
                                  .decoded = true,
                                  .first_token = track.stamps.size(),
                                  .until = track.stamps.size() + stamps.size()};
    const auto tokens =
        compactor_.Append(track.sequence, rows, DrawnRows(model_->layout(), stamps));
    track.tail.reset();
    if (tokens.ok()) track.stamps.insert(track.stamps.end(), stamps.begin(), stamps.end());
    return tokens.status();
  }
  void Free(Track& track) {
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    track.sequence = nullptr;
  }
  void ExpectAnotherToken(Track& track) {
    const absl::Status status = DecodeByCall(track, DrawTokens(1, 1));
    EXPECT_TRUE(status.ok()) << status;
    RunAll();
    EXPECT_EQ(Shown(track), "");
  }
};

class OfEveryPolicy : public ManyForks, public testing::WithParamInterface<const char*> {
 protected:
  // Full tiles of another form are separate segments if a fork came between them.
  static std::uint64_t MostSegments(const Track& track) {
    const bool sums_up = std::string(GetParam()) == "quest:dense_layers=0";
    return 32 + track.stamps.size() / (sums_up ? kTile : 512);
  }
};

TEST_P(OfEveryPolicy, AForkPerTokenCostsFewSegments) {
  Track track = NewTrack(*policies::ParsePolicy(GetParam()));
  std::optional<Track> last;
  while (track.stamps.size() < shm::kMaxSegments + 500) {
    const absl::Status status = DecodeByCall(track, DrawTokens(1, 1));
    ASSERT_TRUE(status.ok()) << track.stamps.size() << ": " << status;
    std::optional<Track> fork = Fork(track);
    if (last.has_value()) Free(*last);
    last = std::move(fork);
    RunAll();
    ASSERT_LE(SegmentsOf(track), MostSegments(track));
  }
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(Shown(*last), "");
  // After the forks are freed, at most a partial tile per segment remains.
  Free(*last);
  Collect();
  EXPECT_LE(Used(pool::MemoryTag::kTiles),
            (track.stamps.size() / kTile + SegmentsOf(track)) * TileBytes());
  const std::shared_ptr<Told> told = Compress(track);
  RunAll();
  EXPECT_EQ(told->times, 1);
  ExpectAnotherToken(track);
}

// A chain like in beam search: each fork continues from the previous one.
TEST_P(OfEveryPolicy, AChainOfForksCostsFewSegments) {
  Track track = NewTrack(*policies::ParsePolicy(GetParam()));
  while (track.stamps.size() < shm::kMaxSegments + 500) {
    ASSERT_TRUE(DecodeByCall(track, DrawTokens(1, 1)).ok()) << track.stamps.size();
    Track child = Fork(track);
    Track sibling = Fork(track);
    ASSERT_TRUE(DecodeByCall(child, DrawTokens(1, 2)).ok());
    ASSERT_TRUE(DecodeByCall(sibling, DrawTokens(1, 3)).ok());
    Free(track);
    Free(sibling);
    track = std::move(child);
    RunAll();
  }
  EXPECT_LE(SegmentsOf(track), MostSegments(track));
  EXPECT_EQ(Shown(track), "");
}

INSTANTIATE_TEST_SUITE_P(Policies, OfEveryPolicy,
                         testing::Values("mosaickv", "dense", "h2o:heavy=6000,recent=6000", "think",
                                         "quest:dense_layers=0", "quest:dense_layers=1"),
                         [](const auto& policy) {
                           std::string name = policy.param;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return !std::isalnum(c); },
                               '_');
                           return name;
                         });

// All forks are alive: shared rows are in segments of as many rows.
TEST_F(ManyForks, ThatLiveHoldNoMoreThanTheirOwnRows) {
  Track track = NewTrack(*policies::ParsePolicy("dense"));
  std::vector<Track> forks;
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(DecodeByCall(track, DrawTokens(1, 1)).ok());
    forks.push_back(Fork(track));
  }
  EXPECT_LE(SegmentsOf(track), 16u);
  // One tile per fork, as for a separate segment with one row.
  EXPECT_LE(Used(pool::MemoryTag::kTiles), (300 + track.stamps.size() / kTile + 16) * TileBytes());
  for (const Track& fork : forks) ASSERT_EQ(Shown(fork), "");
  for (Track& fork : forks) Free(fork);
  Collect();
  EXPECT_LE(Used(pool::MemoryTag::kTiles), (track.stamps.size() / kTile + 16) * TileBytes());
  EXPECT_EQ(Shown(track), "");
}

// A long shared prefix is not copied.
TEST_F(ManyForks, LongSegmentsStayShared) {
  Track track = NewTrack(*policies::ParsePolicy("dense"));
  Append(track, 5000, 1, true);
  std::vector<Track> forks;
  for (int i = 0; i < 20; ++i) {
    forks.push_back(Fork(track));
    for (int token = 0; token < 40; ++token) {
      ASSERT_TRUE(DecodeByCall(forks.back(), DrawTokens(1, 1)).ok());
      Track child = Fork(forks.back());
      Free(forks.back());
      forks.back() = std::move(child);
    }
    Collect();
  }
  EXPECT_LE(Used(pool::MemoryTag::kTiles), (5000 / kTile + 1 + 20 * 4) * TileBytes());
  for (const Track& fork : forks) EXPECT_EQ(Shown(fork), "");
}

// Many small segments are merged once, not by every fork.
TEST_F(ManyForks, ShareWhatWasInManyPieces) {
  for (const std::uint32_t pieces : {15u, 16u, 40u}) {
    Track track = NewTrack(*policies::ParsePolicy("dense"));
    std::vector<Track> forks;
    for (std::uint32_t i = 0; i < pieces; ++i) {
      ASSERT_TRUE(DecodeByCall(track, DrawTokens(kTile, 1)).ok());
      forks.push_back(Fork(track));
    }
    for (Track& fork : forks) Free(fork);
    Collect();
    std::vector<Track> children;
    for (int i = 0; i < 50; ++i) {
      children.push_back(Fork(track));
      ASSERT_TRUE(DecodeByCall(children.back(), DrawTokens(1, 1)).ok());
    }
    Collect();
    EXPECT_LE(Used(pool::MemoryTag::kTiles), (pieces + 1 + children.size()) * TileBytes())
        << pieces << " pieces";
    for (Track& child : children) {
      ASSERT_EQ(Shown(child), "");
      Free(child);
    }
    ASSERT_EQ(Shown(track), "");
    Free(track);
    Collect();
  }
}

// Segments of another form that forks keep from growing are joined by a Compress call.
TEST_F(ManyForks, CompressMakesRoomWhereALaneIsFull) {
  Track track = NewTrack(Quest());
  std::optional<Track> last;
  absl::Status status;
  const Stamps tile = DrawTokens(kTile, 1);
  for (std::uint32_t i = 0; i <= shm::kMaxSegments && status.ok(); ++i) {
    status = DecodeByCall(track, tile);
    std::optional<Track> fork = Fork(track);
    if (last.has_value()) Free(*last);
    last = std::move(fork);
    RunAll();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(SegmentsOf(track), shm::kMaxSegments);
  ASSERT_EQ(Shown(track), "");
  {
    const cache::Tenant::Reader pinned(world_.tenant());
    const cache::SequenceView before = View(track);
    const std::shared_ptr<Told> told = Compress(track);
    RunAll();
    ExpectTold(*told);
    EXPECT_LT(SegmentsOf(track), cache::kCrowded / 16);
    EXPECT_EQ(Differs(before, *model_, track.stamps), "") << "under a pin";
  }
  EXPECT_EQ(Shown(*last), "");
  ExpectAnotherToken(track);
  // Few segments stay unchanged and shared.
  const std::uint32_t segments = SegmentsOf(track);
  Track fork = Fork(track);
  const std::shared_ptr<Told> again = Compress(track);
  RunAll();
  ExpectTold(*again);
  EXPECT_EQ(SegmentsOf(track), segments);
}

class LittleRoom : public ManyForks {
 protected:
  LittleRoom() : ManyForks(64 << 20) {}
  // Leaves this much memory for later operations.
  pool::Charge LeaveRoom(std::uint64_t bytes) {
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    absl::StatusOr<pool::Charge> charge = account.Reserve(
        pool::MemoryTag::kPoolExtents, account.limit_bytes() - account.used_bytes() - bytes);
    EXPECT_TRUE(charge.ok()) << charge.status();
    return *std::move(charge);
  }
};

TEST_F(LittleRoom, CompressJoinsByPortions) {
  Track track = NewTrack(Quest());
  std::optional<Track> last;
  const Stamps tile = DrawTokens(kTile, 1);
  while (track.stamps.size() < (cache::kCrowded + 2) * kTile) {
    ASSERT_TRUE(DecodeByCall(track, tile).ok());
    std::optional<Track> fork = Fork(track);
    if (last.has_value()) Free(*last);
    last = std::move(fork);
    RunAll();
  }
  Free(*last);
  Collect();
  ASSERT_GT(SegmentsOf(track), cache::kCrowded);
  {
    const pool::Charge others = LeaveRoom(512 << 10);
    const std::shared_ptr<Told> told = Compress(track);
    RunAll();
    ExpectTold(*told);
  }
  // Joins the rest once the memory of these is free.
  EXPECT_LE(SegmentsOf(track), cache::kCrowded);
  EXPECT_EQ(Shown(track), "");
}

// With room for only some of the copies an append continues without them, as it does without any
// room.
TEST_F(LittleRoom, MoreIsNeverTooLittle) {
  model_ = world_.Register(cache::SmallModel("four lanes", 2, 2));
  std::optional<std::uint64_t> bare;  // its need after a full tile, where nothing is copied
  for (const std::uint32_t rows : {32u, 31u, 5u}) {
    Track track = NewTrack(*policies::ParsePolicy("dense"));
    ASSERT_TRUE(DecodeByCall(track, DrawTokens(rows, 1)).ok());
    const Track fork = Fork(track);
    std::optional<std::uint64_t> enough;
    for (std::uint64_t room = 0; room <= 96 << 10; room += 1 << 10) {
      Track child = Fork(track);
      {
        const pool::Charge others = LeaveRoom(room);
        const bool ok = DecodeByCall(child, DrawTokens(2, 1)).ok();
        EXPECT_TRUE(ok || !enough.has_value()) << rows << " rows, " << room << " bytes of room";
        if (ok && !enough.has_value()) enough = room;
      }
      EXPECT_EQ(Shown(child), "");
      Free(child);
      Collect();
    }
    ASSERT_TRUE(enough.has_value());
    EXPECT_EQ(*enough, bare.value_or(*enough)) << rows << " rows";
    EXPECT_GT(*enough, 0u);
    bare = enough;
  }
}

// Nor does a fork spend the room that its tail needs on copying its parent's small segments.
TEST_F(LittleRoom, AForkNeedsNoMoreForWhatIsInManyPieces) {
  std::optional<std::uint64_t> needed;
  for (const std::uint32_t pieces : {1u, 16u}) {
    std::optional<std::uint64_t> enough;
    for (std::uint64_t room = 0; room <= 640 << 10; room += 4 << 10) {
      Track track = NewTrack(*policies::ParsePolicy("dense"));
      std::vector<Track> forks;
      for (std::uint32_t i = 0; i < pieces; ++i) {
        if (i > 0) forks.push_back(Fork(track));
        ASSERT_TRUE(DecodeByCall(track, DrawTokens(kTile, 1)).ok());
      }
      Decode(track, 20, 1);
      Collect();
      ASSERT_EQ(SegmentsOf(track), pieces);
      absl::StatusOr<std::shared_ptr<cache::Sequence>> child = absl::UnknownError("");
      {
        const cache::Tenant::Reader pinned(world_.tenant());  // nothing is freed meanwhile
        const pool::Charge others = LeaveRoom(room);
        child = world_.tenant().Fork(worker_->session(), track.sequence->id());
      }
      EXPECT_TRUE(child.ok() || !enough.has_value()) << pieces << " pieces, " << room << " bytes";
      EXPECT_EQ(Shown(track), "");
      if (child.ok()) {
        if (!enough.has_value()) enough = room;
        ASSERT_TRUE(world_.tenant().FreeSequence((*child)->id()).ok());
      }
      for (Track& fork : forks) Free(fork);
      Free(track);
      Collect();
    }
    ASSERT_TRUE(enough.has_value());
    EXPECT_EQ(*enough, needed.value_or(*enough)) << pieces << " pieces";
    needed = enough;
  }
}

// ---- Random operations

class ForksProperty : public ManyForks, public testing::WithParamInterface<const char*> {
 protected:
  struct Pinned {
    std::unique_ptr<cache::Tenant::Reader> reader;
    cache::SequenceView view;
    Stamps stamps;
  };

  void Step() {
    const std::size_t at = random_.Below(tracks_.size());
    const std::uint64_t dice = random_.Below(100);
    if (dice < 45) {
      const std::uint64_t tokens = random_.OneIn(12) ? random_.Between(2, 90) : 1;
      const absl::Status status = DecodeByCall(tracks_[at], DrawTokens(tokens, 1));
      ASSERT_TRUE(status.ok()) << status;
    } else if (dice < 52) {
      Decode(tracks_[at], random_.Between(1, 40), 1);
    } else if (dice < 78) {
      Track child = Fork(tracks_[at]);
      // The child replaces its parent or another sequence, or is added.
      if (tracks_.size() >= 8 || random_.OneIn(2)) {
        const std::size_t goes = random_.OneIn(2) ? at : random_.Below(tracks_.size());
        Free(tracks_[goes]);
        tracks_[goes] = std::move(child);
      } else {
        tracks_.push_back(std::move(child));
      }
    } else if (dice < 84) {
      const std::uint64_t held = tracks_[at].stamps.size();
      const std::uint64_t most = random_.OneIn(20) ? 200 : 4;
      Truncate(tracks_[at], held - random_.Below(std::min(held, most) + 1));
    } else if (dice < 86) {
      const std::shared_ptr<Told> told = Compress(tracks_[at]);
      RunAll();
      EXPECT_EQ(told->times, 1);
    } else if (dice < 90) {
      Track& track = tracks_[at];
      if (pinned_.size() == 3) {
        ASSERT_EQ(Differs(pinned_.front().view, *model_, pinned_.front().stamps), "");
        pinned_.erase(pinned_.begin());
      }
      auto reader = std::make_unique<cache::Tenant::Reader>(world_.tenant());
      pinned_.push_back({std::move(reader), View(track), track.stamps});
    } else if (dice < 93 && tracks_.size() > 1) {
      Free(tracks_[at]);
      tracks_.erase(tracks_.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (random_.OneIn(2)) {
      scheduler_.RunNext();
    } else {
      RunAll();
    }
  }

  std::vector<Track> tracks_;
  std::vector<Pinned> pinned_;
};

TEST_P(ForksProperty, EveryLaneShowsItsRowsAndAllMemoryComesBack) {
  const policies::Policy policy = std::string(GetParam()) == "mosaic"  ? SmallMosaic()
                                  : std::string(GetParam()) == "quest" ? Quest()
                                                                       : policies::Policy();
  tracks_.push_back(NewTrack(policy));
  // Slow, because packed rows are packed again.
  const int steps = policy.mosaic.has_value() ? 400 : 1200;
  for (int step = 0; step < steps; ++step) {
    ASSERT_NO_FATAL_FAILURE(Step()) << step;
    const Track& any = random_.Pick(tracks_);
    if (step % 8 == 0) {
      ASSERT_EQ(Shown(any), "") << step;
      ASSERT_NO_FATAL_FAILURE(world_.Validate()) << step;
      ASSERT_LE(SegmentsOf(any), 16 + any.stamps.size() / kTile) << step;
    }
  }
  RunAll();
  for (const Track& track : tracks_) ASSERT_EQ(Shown(track), "");
  for (const Pinned& pinned : pinned_) {
    ASSERT_EQ(Differs(pinned.view, *model_, pinned.stamps), "");
  }
  pinned_.clear();
  for (Track& track : tracks_) Free(track);
  RunAll();
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), 0u);
  EXPECT_EQ(Used(pool::MemoryTag::kTables), 0u);
}

INSTANTIATE_TEST_SUITE_P(Policies, ForksProperty, testing::Values("dense", "quest", "mosaic"),
                         [](const auto& policy) { return std::string(policy.param); });

}  // namespace
}  // namespace tessera::compaction
