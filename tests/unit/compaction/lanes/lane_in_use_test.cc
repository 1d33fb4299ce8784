// Jobs that meet on one lane: absorbing a tail's tiles never waits for another job.

#include <atomic>
#include <future>
#include <thread>

#include "daemon/compaction/jobs/managed_sequence.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

class LaneInUse : public CompactorTest {};

// Hangs if they wait.
TEST_F(LaneInUse, TilesAreLeftToTheJobThatHoldsTheLane) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  RunAll();
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*track.sequence);
  Decode(track, 40, 1);
  EXPECT_EQ(scheduler_.Queued(), Forms{kTiles});

  std::promise<void> taken;
  std::promise<void> done;
  std::thread seal([&] {
    MutexLock lock(managed->lane(0).work->mutex);
    taken.set_value();
    done.get_future().wait();
  });
  taken.get_future().wait();
  EXPECT_TRUE(scheduler_.RunFirst(kTiles));
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "plain: 32"}));
  EXPECT_EQ(counters().tiles_encoded, 1u) << "the other lane's";
  EXPECT_TRUE(managed->Busy()) << "it stays in the pool until that is made up for";
  done.set_value();
  seal.join();

  // The next tiles include them.
  Decode(track, 32, 1);
  RunAll();
  EXPECT_FALSE(managed->lane(0).work->tiles_left);
  EXPECT_EQ(FormsOf(track), (Forms{"16 kept: 100", "16 kept: 64"}));
  EXPECT_EQ(Shown(track), "");
}

// A job that ends after a policy was set would be mistaken for the new policy's work.
TEST_F(LaneInUse, APolicyIsSetBetweenTwoJobs) {
  policies::Policy half = SmallMosaic();
  half.text = "half";
  half.mosaic->strategy.kept = {0.5};
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  const std::shared_ptr<LaneWork> work = ManagedSequence::Of(*track.sequence)->lane(0).work;
  std::atomic<bool> set = false;
  std::thread sets;
  {
    MutexLock lock(work->mutex);  // as if a job held the lane
    sets = std::thread([&] {
      EXPECT_TRUE(compactor_.SetPolicy(*track.sequence, half).ok());
      set = true;
    });
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    EXPECT_FALSE(set);
    EXPECT_EQ(Compactor::PolicyOf(*track.sequence).text, SmallMosaic().text);
  }
  sets.join();
  EXPECT_EQ(Compactor::PolicyOf(*track.sequence).text, "half");
  RunAll();
  EXPECT_EQ(FormsOf(track), Forms{"32 kept: 100"});
  EXPECT_EQ(Shown(track), "");
}

TEST_F(LaneInUse, ASealThatFoundTilesLeftHasThemEncoded) {
  Track track = NewTrack(SmallMosaic());
  Append(track, 100, 1, true);
  RunAll();
  const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*track.sequence);
  Decode(track, 40, 1);
  managed->lane(0).work->tiles_left = true;  // as if they had arrived during the seal
  EXPECT_FALSE(managed->WantTiles()) << "they are: a job for all lanes is queued";
  const std::shared_ptr<Told> told = Compress(track);
  while (scheduler_.RunFirst(kSeal)) {
  }
  ExpectTold(*told);
  EXPECT_EQ(scheduler_.Queued(), (Forms{kTiles, kTiles})) << "the first is that of before";
  RunAll();
  managed->lane(0).work->tiles_left = true;
  EXPECT_TRUE(managed->WantTiles());
  ExpectTold(*[&] {
    const std::shared_ptr<Told> again = Compress(track);
    RunAll();
    return again;
  }());
  EXPECT_FALSE(managed->WantTiles()) << "the job for one lane is not that for all";
  managed->TilesBegin();
  EXPECT_FALSE(managed->Busy());
  EXPECT_EQ(Shown(track), "");
}

}  // namespace
}  // namespace tessera::compaction
