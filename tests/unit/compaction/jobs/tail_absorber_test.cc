#include "daemon/compaction/jobs/tail_absorber.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::compaction {
namespace {

using cache::NewStamps;
using cache::Sequence;
using cache::SessionState;
using cache::TestWorker;

const char* const kJob = "absorb-tails";

// A worker with decoding sequences, seen through its session's mapping.
class Decoder {
 public:
  Decoder(cache::World& world, const cache::Model& model, int sequences)
      : worker_(world.tenant(), world.OpenSession()) {
    for (int i = 0; i < sequences; ++i) {
      Decoding decoding;
      decoding.sequence = world.NewSequence(worker_.session(), model);
      decoding.tail = *worker_.Open(*decoding.sequence);
      decoding_.push_back(decoding);
    }
  }

  // Writes and commits tokens. Returns true if the ring had room for all.
  bool Step(std::size_t i, std::uint64_t tokens) {
    Decoding& it = decoding_[i];
    for (; tokens > 0; --tokens, ++it.tokens) {
      if (!worker_.HasRoom(*it.sequence, it.tokens)) break;
      worker_.Write(*it.sequence, it.tail, it.tokens, NewStamps(1)[0]);
    }
    worker_.Commit(it.tail, it.tokens);
    return tokens == 0;
  }
  // Takes the wake request, like end_step after a full tile. Returns true if the worker must
  // signal.
  bool TakeWish() { return worker_.session().control()->page().wake.exchange(0) == 1; }

  std::uint64_t InSegments(std::size_t i) const {
    return decoding_[i].sequence->Describe(/*lanes=*/true).lanes.front().entries;
  }
  std::uint64_t tokens(std::size_t i) const { return decoding_[i].tokens; }
  TestWorker& worker() { return worker_; }
  const std::shared_ptr<SessionState>& session() { return worker_.shared_session(); }
  Sequence& sequence(std::size_t i) { return *decoding_[i].sequence; }

 private:
  struct Decoding {
    std::shared_ptr<Sequence> sequence;
    TestWorker::OpenTail tail;
    std::uint64_t tokens = 0;
  };
  TestWorker worker_;
  std::vector<Decoding> decoding_;
};

class TailAbsorberTest : public testing::Test {
 protected:
  void TearDown() override { std::fclose(log_); }
  int LogLines() {
    std::fflush(log_);
    const long end = std::ftell(log_);
    std::rewind(log_);
    int lines = 0;
    for (int c = std::fgetc(log_); c != EOF; c = std::fgetc(log_)) lines += c == '\n';
    std::fseek(log_, end, SEEK_SET);
    return lines;
  }

  std::FILE* log_ = std::tmpfile();
  Logger logger_{LogOptions{.stream = log_}};
  cache::World world_{cache::World::Options{.ring_tiles = 4}};
  std::shared_ptr<const cache::Model> model_ = world_.Register(cache::SmallModel("small", 1, 1));
  ManualScheduler scheduler_;
  TailAbsorber absorber_{TailAbsorber::Options{
      .scheduler = &scheduler_, .logger = &logger_, .clock = &world_.clock()}};
};

TEST_F(TailAbsorberTest, AWakeMovesFullTilesAndAsksForTheNext) {
  Decoder decoder(world_, *model_, 2);
  EXPECT_TRUE(decoder.TakeWish());  // a new session sleeps
  decoder.Step(0, 70);
  decoder.Step(1, 20);
  absorber_.Wake(decoder.session());
  absorber_.Wake(decoder.session());
  EXPECT_EQ(scheduler_.Queued(), std::vector<std::string>{kJob});  // one job per session
  scheduler_.RunAll(kJob);
  EXPECT_EQ(decoder.InSegments(0), 64u);
  EXPECT_EQ(decoder.InSegments(1), 0u);
  EXPECT_TRUE(decoder.TakeWish());
  EXPECT_FALSE(decoder.TakeWish());
  EXPECT_GE(absorber_.jobs_run(), 1u);
  const std::uint64_t run = absorber_.jobs_run();
  absorber_.Wake(decoder.session());
  scheduler_.RunAll(kJob);
  EXPECT_EQ(absorber_.jobs_run(), run + 1);
}

TEST_F(TailAbsorberTest, AJobIsItsTenantsAndItsSessions) {
  Decoder one(world_, *model_, 1);
  Decoder two(world_, *model_, 1);
  for (Decoder* decoder : {&one, &two}) {
    decoder->Step(0, 32);
    absorber_.Wake(decoder->session());
  }
  for (int round = 0; round < 2; ++round) {  // first queued, then queued again by itself
    const std::vector<JobSpec> specs = scheduler_.QueuedSpecs();
    ASSERT_EQ(specs.size(), 2u);
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(specs[i].tenant, world_.tenant().options().id);
      EXPECT_TRUE(specs[i].tenant.valid());
      EXPECT_EQ(specs[i].owner, (i == 0 ? one : two).session()->id().value());
      EXPECT_EQ(specs[i].priority, JobPriority::kTails);
      ASSERT_TRUE(scheduler_.RunFirst(kJob));
    }
  }
}

TEST_F(TailAbsorberTest, NoWishStandsWhileAJobIsQueuedBehindProgress) {
  Decoder decoder(world_, *model_, 1);
  decoder.Step(0, 40);
  absorber_.Wake(decoder.session());
  ASSERT_TRUE(scheduler_.RunFirst(kJob));
  EXPECT_EQ(decoder.InSegments(0), 32u);
  ASSERT_FALSE(scheduler_.Queued().empty());
  EXPECT_FALSE(decoder.TakeWish());  // no system call needed
  scheduler_.RunAll(kJob);
  EXPECT_TRUE(decoder.TakeWish());
}

TEST_F(TailAbsorberTest, WorkOfASessionThatHasEndedIsDropped) {
  auto decoder = std::make_unique<Decoder>(world_, *model_, 3);
  for (std::size_t i = 0; i < 3; ++i) decoder->Step(i, 64);
  absorber_.Wake(decoder->session());
  world_.tenant().EndSession(decoder->session()->id());
  decoder.reset();
  EXPECT_EQ(scheduler_.RunAll(kJob), 1);
  EXPECT_EQ(absorber_.jobs_run(), 0u);
  world_.ExpectBaseline();
}

TEST_F(TailAbsorberTest, ASessionThatNeverStopsKeepsNobodyWaiting) {
  Decoder busy(world_, *model_, 2);
  Decoder quiet(world_, *model_, 1);
  busy.Step(0, 64);
  absorber_.Wake(busy.session());
  quiet.Step(0, 32);
  absorber_.Wake(quiet.session());
  // Before each job of the busy session, its worker has committed another tile.
  int ran = 0;
  while (quiet.InSegments(0) == 0 && ran < 20) {
    busy.Step(static_cast<std::size_t>(ran % 2), 32);
    ASSERT_TRUE(scheduler_.RunFirst(kJob));
    ++ran;
  }
  EXPECT_EQ(quiet.InSegments(0), 32u);
  EXPECT_LE(ran, 2);
}

TEST_F(TailAbsorberTest, LingersForAsLongAsItIsTold) {
  TailAbsorber lingering({.scheduler = &scheduler_,
                          .logger = &logger_,
                          .clock = &world_.clock(),
                          .linger = std::chrono::milliseconds(5)});
  Decoder decoder(world_, *model_, 1);
  lingering.Wake(decoder.session());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(scheduler_.RunFirst(kJob));
    EXPECT_FALSE(decoder.TakeWish());
    world_.clock().Advance(std::chrono::milliseconds(1));
  }
  decoder.Step(0, 32);  // found without a wake
  ASSERT_TRUE(scheduler_.RunFirst(kJob));
  EXPECT_EQ(decoder.InSegments(0), 32u);
  world_.clock().Advance(std::chrono::milliseconds(4));
  ASSERT_TRUE(scheduler_.RunFirst(kJob));
  EXPECT_FALSE(decoder.TakeWish());  // 4 ms without finding anything
  world_.clock().Advance(std::chrono::milliseconds(1));
  ASSERT_TRUE(scheduler_.RunFirst(kJob));
  EXPECT_TRUE(decoder.TakeWish());
  EXPECT_TRUE(scheduler_.Queued().empty());
}

TEST_F(TailAbsorberTest, AFullPoolKeepsTheTailAndIsLoggedOnceASecond) {
  cache::World world(cache::World::Options{.tenant_limit = 200 * 1024, .ring_tiles = 4});
  const std::shared_ptr<const cache::Model> model =
      world.Register(cache::SmallModel("small", 1, 1));
  TailAbsorber absorber({.scheduler = &scheduler_, .logger = &logger_, .clock = &world_.clock()});
  Decoder decoder(world, *model, 1);
  pool::Block filler =
      *world.tenant().pool().Allocate(200 * 1024 - world.tenant().account().used_bytes() - 4096,
                                      pool::Fit::kExact, pool::MemoryTag::kTiles);
  decoder.Step(0, 64);
  for (int i = 0; i < 50; ++i) {
    absorber.Wake(decoder.session());
    scheduler_.RunAll(kJob);
  }
  EXPECT_EQ(decoder.InSegments(0), 0u);
  EXPECT_TRUE(decoder.sequence(0).decoding());
  EXPECT_TRUE(decoder.TakeWish());
  EXPECT_EQ(LogLines(), 1);
  world_.clock().Advance(std::chrono::seconds(1));
  absorber.Wake(decoder.session());
  scheduler_.RunAll(kJob);
  EXPECT_EQ(LogLines(), 2);
  filler.Reset();
  absorber.Wake(decoder.session());
  scheduler_.RunAll(kJob);
  EXPECT_EQ(decoder.InSegments(0), 64u);
}

TEST_F(TailAbsorberTest, ASequenceThatFailsDoesNotStopItsNeighbours) {
  Decoder decoder(world_, *model_, 3);
  for (std::size_t i = 0; i < 3; ++i) decoder.Step(i, 32);
  // An impossible count, which only this worker can have written.
  const std::uint32_t slot = 1;
  decoder.session()->control()->page().commits[slot].store(shm::CommitWord::Pack(1, 1'000'000),
                                                           std::memory_order_release);
  absorber_.Wake(decoder.session());
  scheduler_.RunAll(kJob);
  EXPECT_EQ(decoder.InSegments(0), 32u);
  EXPECT_TRUE(decoder.sequence(1).failed());
  EXPECT_EQ(decoder.InSegments(2), 32u);
  EXPECT_EQ(LogLines(), 1);
  absorber_.Wake(decoder.session());
  scheduler_.RunAll(kJob);
  EXPECT_EQ(LogLines(), 1);  // it was removed from the session's decoding sequences
}

// Lets the worker run in the middle of a job: the job reads the time between checking the tails and
// requesting a wake.
class InterruptingClock final : public Clock {
 public:
  TimePoint Now() const override {
    if (interrupt_) interrupt_();
    return TimePoint(Duration(1));
  }
  void Interrupt(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

 private:
  std::function<void()> interrupt_;
};

// All interleavings of a worker's and the daemon's steps: in any order, a tile that was full before
// the end is absorbed, or the worker was asked to signal.
TEST_F(TailAbsorberTest, NoInterleavingLosesAWake) {
  InterruptingClock clock;
  TailAbsorber absorber({.scheduler = &scheduler_, .logger = &logger_, .clock = &clock});
  // The worker fills a tile and commits, takes the wake request, and signals if there was one. The
  // daemon runs queued jobs one at a time, or receives a pending signal.
  for (int word = 0; word < 1 << 13; ++word) {
    Decoder decoder(world_, *model_, 1);
    int worker_at = 0;
    bool signalled = false;
    int tiles = 0;
    const auto worker_step = [&] {
      if (worker_at == 0) {
        if (tiles == 3) return;
        ++tiles;
        decoder.Step(0, 32);
        worker_at = 1;
      } else {
        signalled = decoder.TakeWish() || signalled;
        worker_at = 0;
      }
    };
    const auto daemon_step = [&] {
      if (signalled) {
        signalled = false;
        absorber.Wake(decoder.session());
      } else {
        scheduler_.RunFirst(kJob);
      }
    };
    int asked = 0;
    clock.Interrupt([&] {
      if ((word >> (9 + asked++ % 4)) & 1) worker_step();
    });
    for (int bit = 0; bit < 9; ++bit) (word >> bit) & 1 ? worker_step() : daemon_step();
    clock.Interrupt(nullptr);
    if (worker_at == 1) worker_step();
    // No further tiles: only pending work runs.
    for (int i = 0; i < 10; ++i) daemon_step();
    ASSERT_EQ(decoder.InSegments(0), static_cast<std::uint64_t>(tiles) * 32) << "order " << word;
    ASSERT_TRUE(scheduler_.Queued().empty());
    world_.tenant().EndSession(decoder.session()->id());
  }
}

// The same with real threads, so that the daemon may run between any two instructions of the
// worker.
TEST_F(TailAbsorberTest, NoWakeIsLostBetweenThreads) {
  std::unique_ptr<ThreadScheduler> threads = *ThreadScheduler::Create({.threads = 2});
  TailAbsorber absorber({.scheduler = threads.get(), .logger = &logger_, .clock = &world_.clock()});
  Decoder decoder(world_, *model_, 1);
  // ThreadSanitizer needs one mapping for both sides, which the concurrency test of the cache has.
  // Here the ring's content does not matter.
  for (int round = 0; round < 3000; ++round) {
    // The worker waits only for ring space, and hangs here if a wake is lost.
    while (!decoder.Step(0, 32 - decoder.tokens(0) % 32)) {
      if (decoder.TakeWish()) absorber.Wake(decoder.session());
      world_.tenant().epochs().Collect();
      std::this_thread::yield();
    }
    if (decoder.TakeWish()) absorber.Wake(decoder.session());
  }
  threads.reset();  // joins the threads, so that no job outlives its data
  EXPECT_EQ(decoder.tokens(0), 3000u * 32);
}

}  // namespace
}  // namespace tessera::compaction
