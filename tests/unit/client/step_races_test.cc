// Steps while another thread closes tails: the worker's view must match what the step returned.

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

ModelGeometry RacedModel() {
  ModelGeometry model;
  model.name = "small";
  model.layers.assign(2, {.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  return model;
}

ModelGeometry OneHeadModel() {
  ModelGeometry model;
  model.name = "tiny";
  model.layers.assign(1, {.query_heads = 1, .kv_heads = 1, .head_dim = 64});
  return model;
}

// Repeats an operation on its own thread, at least once.
class Meanwhile {
 public:
  explicit Meanwhile(std::function<void()> what)
      : thread_([this, what = std::move(what)] {
          do {
            what();
            begun_.store(true);
            begun_.notify_one();
          } while (!over_);
        }) {
    begun_.wait(false);
  }
  ~Meanwhile() {
    over_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> begun_{false};
  std::atomic<bool> over_{false};
  std::thread thread_;
};

// Runs an operation once per step on its own thread, at any moment of the step's first part.
class OnceAStep {
 public:
  OnceAStep(TestRandom& random, std::uint64_t longest, std::function<void()> what)
      : random_(random.Bits()), meanwhile_([this, longest, what = std::move(what)] {
          if (begun_ == done_) return;
          for (std::uint64_t wait = random_.Below(longest); wait > 0; --wait) (void)begun_.load();
          what();
          ++done_;
        }) {}
  void BeginStep() { ++begun_; }
  void EndStep() {
    while (done_ != begun_) std::this_thread::yield();
  }

 private:
  TestRandom random_;
  std::atomic<int> begun_{0};
  std::atomic<int> done_{0};
  const Meanwhile meanwhile_;
};

struct StepOutcomes {
  int counted = 0;
  int aborted = 0;
};

// The daemon and the worker agree on the number of tokens after every step, however it ended.
StepOutcomes Decode(Decoder& decoder, Track& track, int steps, OnceAStep* meanwhile = nullptr) {
  StepOutcomes outcomes;
  const std::uint64_t id = track.sequence.id().value();
  for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) {
    if (meanwhile != nullptr) meanwhile->BeginStep();
    const absl::Status status = decoder.RunStep(track);
    if (meanwhile != nullptr) meanwhile->EndStep();
    EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
    ++(status.ok() ? outcomes.counted : outcomes.aborted);
    EXPECT_EQ(decoder.daemon->TokensOf(id), track.history.tokens()) << status;
    EXPECT_EQ(track.sequence.tokens(), track.history.tokens()) << status;
    if (i % 50 == 0) decoder.daemon->Collect();
  }
  return outcomes;
}

// At any moment of a step.
TEST(StepRaces, WhoeverMovesSequencesMeanwhileTakesAllTheirTokens) {
  TestRandom random;
  Decoder decoder(random, RacedModel());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 40);
  const std::uint64_t id = track.sequence.id().value();
  std::atomic<std::uint64_t> moved{0};
  const Meanwhile mover([&] { moved += decoder.daemon->OffloadAsDaemon(id); });
  EXPECT_GT(Decode(decoder, track, 400).counted, 0);
  EXPECT_GT(moved, 0u);
}

// No pin protects a tail from another worker's call on the sequence.
TEST(StepRaces, ATailClosedMeanwhileTakesAllOrNothing) {
  TestRandom random;
  Decoder decoder(random, RacedModel());
  Track track = decoder.NewTrack();
  const std::uint64_t id = track.sequence.id().value();
  OnceAStep closer(random, 40000, [&] { decoder.daemon->CloseTailOf(id); });
  EXPECT_GT(Decode(decoder, track, 500, &closer).counted, 0);
}

TEST(StepRaces, APinRevokedMeanwhileTakesAllOrNothing) {
  TestRandom random;
  Decoder decoder(random, RacedModel());
  Track track = decoder.NewTrack();
  const std::uint64_t id = track.sequence.id().value();
  OnceAStep revoker(random, 40000, [&] {
    decoder.daemon->RevokePins();
    decoder.daemon->OffloadAsDaemon(id);
  });
  EXPECT_GT(Decode(decoder, track, 300, &revoker).counted, 0);
}

// A commit of many sequences takes long enough for an operation to hit its middle.
class WideBatch {
 public:
  static constexpr std::size_t kSequences = 64;

  WideBatch(TestRandom& random, Decoder& decoder, std::size_t sequences = kSequences)
      : decoder_(decoder), rows_(random, BoundModel(ModelId(1), OneHeadModel(), 4), 0, sequences) {
    for (std::size_t i = 0; i < sequences; ++i) tracks_.push_back(decoder.NewTrack());
  }

  absl::Status Step() {
    std::vector<Sequence*> batch;
    for (Track& track : tracks_) batch.push_back(&track.sequence);
    absl::StatusOr<client::Step> step = decoder_.worker->BeginStep(batch);
    if (!step.ok()) return step.status();
    if (absl::Status status = step->Append(0, rows_.key, rows_.value); !status.ok()) return status;
    return step->End();
  }
  std::uint64_t id(std::size_t i) const { return tracks_[i].sequence.id().value(); }
  std::uint64_t tokens(std::size_t i) const { return tracks_[i].sequence.tokens(); }

 private:
  Decoder& decoder_;
  LayerRows rows_;
  std::vector<Track> tracks_;
};

// A step computed for other positions is not reported as one to retry.
TEST(StepRaces, ASequenceCutMeanwhileIsNotTakenForWhatItWas) {
  TestRandom random;
  Decoder decoder(random, OneHeadModel());
  WideBatch batch(random, decoder, 1);
  OnceAStep cutter(random, 2000, [&] {
    const std::uint64_t tokens = decoder.daemon->TokensOf(batch.id(0)).value_or(0);
    if (tokens > 2) decoder.daemon->TruncateAsOther(batch.id(0), tokens - 2);
  });
  int changed = 0;
  for (int i = 0; i < 3000 && !testing::Test::HasFailure(); ++i) {
    const std::uint64_t before = batch.tokens(0);
    cutter.BeginStep();
    const absl::Status status = batch.Step();
    cutter.EndStep();
    if (absl::IsFailedPrecondition(status)) {
      ++changed;
    } else {
      EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
      EXPECT_EQ(batch.tokens(0), before + (status.ok() ? 1 : 0)) << status;
    }
    decoder.daemon->Collect();
  }
  EXPECT_GT(changed, 0);
}

TEST(StepRaces, AStepCountsInAllOfItsSequencesOrInNone) {
  TestRandom random;
  Decoder decoder(random, OneHeadModel());
  WideBatch batch(random, decoder);
  TestRandom other(random.Bits());
  OnceAStep closer(random, 40000, [&] {
    decoder.daemon->CloseTailOf(batch.id(other.Below(WideBatch::kSequences)));
  });
  int counted = 0;
  for (int i = 0; i < 2000 && !testing::Test::HasFailure(); ++i) {
    const std::uint64_t before = batch.tokens(0);
    closer.BeginStep();
    const absl::Status status = batch.Step();
    closer.EndStep();
    EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
    counted += status.ok();
    for (std::size_t j = 0; j < WideBatch::kSequences; ++j) {
      ASSERT_EQ(batch.tokens(j), before + (status.ok() ? 1 : 0)) << status;
      ASSERT_EQ(batch.tokens(j), decoder.daemon->TokensOf(batch.id(j))) << status;
    }
    decoder.daemon->Absorb();
    decoder.daemon->Collect();
  }
  EXPECT_GT(counted, 0);
}

}  // namespace
}  // namespace tessera::client
