// Forks that share rows waiting for a strategy: one sequence seals them, the others adopt the
// result.

#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

class ForkSeal : public CompactorTest {
 protected:
  Track Fork(const Track& parent) {
    auto child = compactor_.Fork(*parent.sequence, [&] {
      return world_.tenant().Fork(worker_->session(), parent.sequence->id());
    });
    EXPECT_TRUE(child.ok()) << child.status();
    Track track = {*std::move(child), parent.stamps, std::nullopt};
    track.stamps.resize(track.sequence->Describe(false).tokens);
    return track;
  }
  // The tiles of a lane's segments, as in their tables.
  std::vector<std::uint64_t> TablesOf(const Track& track) {
    std::vector<std::uint64_t> tables;
    const auto runs = track.sequence->LookAt(0, /*whole=*/true);
    EXPECT_TRUE(runs.ok()) << runs.status();
    for (const auto* held : {&(*runs)[0].settled, &(*runs)[0].provisional, &(*runs)[0].plain}) {
      for (const cache::HeldSegment& one : *held) tables.push_back(one.segment->table_offset());
    }
    return tables;
  }
  void Free(Track& track) {
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    track.sequence.reset();
    Collect();
  }
};

TEST_F(ForkSeal, ForksOfAPromptThatWaitsShareWhatBecomesOfIt) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 600, 1, /*end_of_prompt=*/true);
  std::vector<Track> all;
  for (int i = 0; i < 4; ++i) all.push_back(Fork(parent));
  all.push_back(std::move(parent));
  const std::uint64_t plain = Used(pool::MemoryTag::kTiles);
  RunAll();
  const std::uint64_t lanes = model_->lanes();
  const std::uint64_t packed = Used(pool::MemoryTag::kTiles);
  EXPECT_LT(packed, plain) << "nobody holds rows as they came any more";
  for (Track& track : all) {
    EXPECT_EQ(TablesOf(track), TablesOf(all.front()));
    EXPECT_EQ(Shown(track), "");
    EXPECT_EQ(track.sequence->OpenEntries(0), 0u);
  }
  EXPECT_EQ(counters().segments_sealed, 3 * lanes) << "of 256, 256 and 88 tokens, once";
  // Shared tiles live until their last sequence is freed.
  while (all.size() > 1) {
    ASSERT_NO_FATAL_FAILURE(Free(all.back()));
    all.pop_back();
    EXPECT_EQ(Used(pool::MemoryTag::kTiles), packed);
  }
  ASSERT_NO_FATAL_FAILURE(Free(all.back()));
  EXPECT_EQ(Used(pool::MemoryTag::kTiles), 0u);
}

// A fork that has continued adopts the sealed prompt and keeps its own rows.
TEST_F(ForkSeal, WhatAForkHasDecodedIsItsOwn) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 300, 1, /*end_of_prompt=*/true);
  Track fork = Fork(parent);
  Decode(fork, 70, 2);
  Decode(parent, 40, 3);
  RunAll();
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(fork), "");
  const auto of_parent = TablesOf(parent);
  const auto of_fork = TablesOf(fork);
  ASSERT_FALSE(of_parent.empty());
  ASSERT_FALSE(of_fork.empty());
  EXPECT_EQ(of_parent[0], of_fork[0]) << "the segment of 256";
  for (Track* track : {&parent, &fork}) {
    Append(*track, 300, 2, /*end_of_prompt=*/true);
    RunAll();
    EXPECT_EQ(Shown(*track), "");
  }
}

// A fork whose policy packs nothing needs no raw copies; its parent does.
TEST_F(ForkSeal, AForkUnderAnotherPolicyTakesNothingFromItsParent) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 128, 1, /*end_of_prompt=*/true);
  RunAll();
  Decode(parent, 32, 2);
  RunAll();
  const std::uint64_t raw = RawBytes();
  EXPECT_GT(raw, 0u);
  Track fork = Fork(parent);
  ASSERT_TRUE(compactor_.SetPolicy(*fork.sequence, policies::Policy()).ok());
  EXPECT_EQ(RawBytes(), raw);
  Decode(parent, 64, 2);
  RunAll();
  EXPECT_EQ(FormsOf(parent).size(), 2u) << "what was decoded has a strategy of its own, all of it";
  EXPECT_EQ(FormsOf(parent)[1], "16 kept: 96");
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(fork), "");
  ASSERT_TRUE(compactor_.SetPolicy(*parent.sequence, policies::Policy()).ok());
}

// The first one to seal does so for sequences of the same policy, and does not keep others from
// sealing.
TEST_F(ForkSeal, ForksUnderAnotherPolicyShareAmongThemselves) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 600, 1, /*end_of_prompt=*/true);
  policies::Policy other = SmallMosaic();
  other.text = "another";
  std::vector<Track> forks;
  for (int i = 0; i < 2; ++i) {
    forks.push_back(Fork(parent));
    ASSERT_TRUE(compactor_.SetPolicy(*forks.back().sequence, other).ok());
  }
  RunAll();
  EXPECT_EQ(TablesOf(forks[0]), TablesOf(forks[1]));
  EXPECT_NE(TablesOf(forks[0]), TablesOf(parent));
  EXPECT_EQ(counters().segments_sealed, 2 * 3 * model_->lanes());
}

// A shorter fork adopts the segments that lie within it, and seals its own end.
TEST_F(ForkSeal, AForkThatWasCutTakesWhatIsWhollyItsOwn) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 600, 1, /*end_of_prompt=*/true);
  Track fork = Fork(parent);
  Truncate(fork, 300);
  RunAll();
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(fork), "");
  EXPECT_EQ(TablesOf(parent)[0], TablesOf(fork)[0]);
  EXPECT_NE(TablesOf(parent)[1], TablesOf(fork)[1]);
  EXPECT_EQ(fork.sequence->OpenEntries(0), 0u);
}

TEST_F(ForkSeal, AnotherPolicyTakesNothingOver) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 300, 1, /*end_of_prompt=*/true);
  Track fork = Fork(parent);
  policies::Policy other = SmallMosaic();
  other.mosaic->strategy.kept = {0.5};
  other.text = "another";
  ASSERT_TRUE(compactor_.SetPolicy(*fork.sequence, other).ok());
  RunAll();
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(Shown(fork), "");
  EXPECT_NE(TablesOf(parent)[0], TablesOf(fork)[0]);
  EXPECT_NE(FormsOf(parent), FormsOf(fork));
}

// Rows that were cut and replaced in the same tiles do not adopt what the old rows became.
TEST_F(ForkSeal, RowsThatWereWrittenAnewAreSealedAnew) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 200, 1);
  Track fork = Fork(parent);
  const auto told = Compress(parent);
  RunAll();
  ExpectTold(*told);
  // Once it alone uses the raw rows, the fork may overwrite those after its cut.
  const std::vector<std::uint64_t> tables = TablesOf(fork);
  Truncate(fork, 40);
  Collect();
  Append(fork, 160, 2);
  EXPECT_EQ(TablesOf(fork), tables) << "in the same tiles";
  EXPECT_EQ(Shown(fork), "");
  const auto again = Compress(fork);
  RunAll();
  ExpectTold(*again);
  EXPECT_EQ(Shown(fork), "");
  EXPECT_EQ(Shown(parent), "");
  EXPECT_NE(TablesOf(parent)[0], TablesOf(fork)[0]);
}

// A fork that was cut seals fewer rows. The next fork adopts what the parent made of all of them.
TEST_F(ForkSeal, WhatWasMadeOfMoreRowsIsWhatStays) {
  Track parent = NewTrack(SmallMosaic());
  Append(parent, 600, 1, /*end_of_prompt=*/true);
  Track cut = Fork(parent);
  Track whole = Fork(parent);
  Truncate(cut, 300);
  for (Track* track : {&parent, &cut, &whole}) {
    const auto told = Compress(*track);
    RunAll();
    ExpectTold(*told);
    EXPECT_EQ(Shown(*track), "");
  }
  EXPECT_EQ(TablesOf(whole), TablesOf(parent));
}

// One of two forks decodes a value that no packed row can hold.
TEST_F(ForkSeal, AValueThatDoesNotFitIsItsOwnHoldersAffair) {
  policies::Policy halves = SmallMosaic();
  halves.text = "values in fp16";
  halves.mosaic->strategy.values = kernels::ValueType::kFp16;
  Track parent = NewTrack(halves);
  Append(parent, 256, 1, /*end_of_prompt=*/true);
  RunAll();
  Append(parent, 200, 1);  // the first part of the next prompt
  Track fork = Fork(parent);
  Stamps stamps = DrawTokens(64, 1);
  stamps[3] |= kHuge;
  DecodeStamps(parent, stamps);
  RunAll();
  Append(fork, 300, 1, /*end_of_prompt=*/true);
  RunAll();
  for (const std::string& form : FormsOf(fork)) EXPECT_THAT(form, testing::StartsWith("16 kept"));
  EXPECT_EQ(Shown(fork), "");
  EXPECT_EQ(Shown(parent), "");
}

}  // namespace
}  // namespace tessera::compaction
