// Decoding through both transports, compared with arrays of all tokens.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "client/api/worker_access.h"
#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

ModelGeometry SmallModel() {
  ModelGeometry model;
  model.name = "small";
  model.layers.assign(2, {.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  return model;
}

enum class Door { kMapped, kRemote };

class DecodeStory : public testing::TestWithParam<Door> {};

// Everything that may happen to a set of sequences, in any order.
TEST_P(DecodeStory, HoldsWhatWasAppendedWhateverTheDaemonDoes) {
  TestRandom random;
  const bool mapped = GetParam() == Door::kMapped;
  for (int story = 0; story < 4; ++story) {
    const ModelGeometry geometry = RandomGeometry(random);
    Decoder decoder(random, geometry, {}, mapped);
    fakes::MappedDaemon& daemon = *decoder.daemon;
    decoder.sleeper.meanwhile = [&] {
      daemon.Absorb();
      daemon.Collect();
    };
    std::vector<std::unique_ptr<Track>> tracks;
    std::uint64_t aborted = 0;
    for (int move = 0; move < 150; ++move) {
      if (tracks.empty() || (tracks.size() < 5 && random.OneIn(15))) {
        tracks.push_back(std::make_unique<Track>(decoder.NewTrack()));
      }
      Track& track = *random.Pick(tracks);
      switch (random.Below(20)) {
        case 0:
          decoder.Prefill(track, random.Between(1, 150));
          break;
        case 1:
          daemon.Absorb();
          break;
        case 2:
          daemon.Collect();
          break;
        case 3:
          daemon.Republish();
          break;
        case 4:
          daemon.DropEmptyExtents();
          break;
        case 5: {
          absl::StatusOr<Sequence> child = track.sequence.Fork();
          TESSERA_ASSERT_OK(child.status());
          if (tracks.size() < 6) {
            tracks.push_back(std::make_unique<Track>(Track{*std::move(child), track.history}));
          }
          break;
        }
        case 6: {
          const std::uint64_t keep = random.Between(0, track.history.tokens());
          TESSERA_ASSERT_OK(track.sequence.Truncate(keep));
          track.history.Truncate(keep);
          break;
        }
        case 7:
          TESSERA_ASSERT_OK(track.sequence.Park());
          break;
        case 8:
          if (tracks.size() > 2) tracks.erase(tracks.begin());
          continue;
        case 9:
          daemon.CloseTailOf(track.sequence.id().value());
          break;
        case 10:
          if (mapped) {
            ASSERT_TRUE(daemon.OffloadAsDaemon(track.sequence.id().value()));
          }
          break;
        default: {
          std::vector<Track*> batch;
          for (const auto& each : tracks) {
            if (random.OneIn(2)) batch.push_back(each.get());
          }
          if (batch.empty()) batch.push_back(&track);
          std::vector<std::uint32_t> counts, accepted;
          for (std::size_t i = 0; i < batch.size(); ++i) {
            counts.push_back(static_cast<std::uint32_t>(random.Between(1, 9)));
            accepted.push_back(static_cast<std::uint32_t>(random.Below(counts.back() + 1)));
          }
          if (random.OneIn(2)) accepted.clear();
          const bool revoke = mapped && random.OneIn(4);
          const std::uint32_t at =
              static_cast<std::uint32_t>(random.Below(geometry.layers.size() + 1));
          const absl::Status status = decoder.RunStep(batch, {.new_tokens_each = counts}, accepted,
                                                      [&](std::uint32_t layer) {
                                                        if (random.OneIn(4)) daemon.Absorb();
                                                        if (random.OneIn(4)) daemon.Republish();
                                                        if (random.OneIn(4))
                                                          daemon.DropEmptyExtents();
                                                        if (revoke && layer == at) {
                                                          EXPECT_EQ(daemon.RevokePins(), 1u);
                                                          daemon.Republish();
                                                        }
                                                      });
          if (HasFatalFailure()) return;
          ASSERT_EQ(status.ok(), !revoke) << status;
          ASSERT_EQ(absl::IsAborted(status), revoke) << status;
          aborted += revoke;
        }
      }
      if (HasFatalFailure()) return;
      ASSERT_EQ(daemon.pins(), 0u);
      ASSERT_EQ(daemon.TokensOf(track.sequence.id().value()).value_or(0), track.sequence.tokens());
    }
    RecordProperty("aborted", static_cast<int>(aborted));
  }
}

INSTANTIATE_TEST_SUITE_P(Doors, DecodeStory, testing::Values(Door::kMapped, Door::kRemote),
                         [](const auto& door) {
                           return door.param == Door::kMapped ? "Mapped" : "Remote";
                         });

TEST(Step, SeparateAppendAndAttendSeeWhatTheLayerHolds) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 70);
  const BoundModel& bound = track.history.model();
  Sequence* batch[] = {&track.sequence};
  absl::StatusOr<Step> step = decoder.worker->BeginStep(batch, {.new_tokens = 3});
  TESSERA_ASSERT_OK(step.status());
  LayerRows rows(random, bound, 0, 3);
  TESSERA_ASSERT_OK(step->Attend(0, rows.tensors()));  // nothing is appended: only the prompt
  track.history.Check(0, 70, 3, true, rows.query.data(), rows.output.data(), rows.lse.data());
  TESSERA_ASSERT_OK(step->Append(0, rows.key, rows.value));
  TESSERA_ASSERT_OK(step->Attend(0, rows.tensors()));
  History with = track.history;
  with.Append(0, rows.key, rows.value);
  with.Check(0, 70, 3, true, rows.query.data(), rows.output.data(), rows.lse.data());
}

TEST(Step, EndNamesTheLayersThatAreMissing) {
  TestRandom random;
  ModelGeometry geometry = SmallModel();
  geometry.layers.assign(6, geometry.layers[0]);
  Decoder decoder(random, geometry);
  Track track = decoder.NewTrack();
  Sequence* batch[] = {&track.sequence};
  absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
  TESSERA_ASSERT_OK(step.status());
  for (std::uint32_t layer : {1u, 5u}) {
    LayerRows rows(random, track.history.model(), layer, 1);
    TESSERA_ASSERT_OK(step->Append(layer, rows.key, rows.value));
    EXPECT_TRUE(absl::IsFailedPrecondition(step->Append(layer, rows.key, rows.value)));
  }
  const absl::Status status = step->End();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.ToString().find("missing: 0, 2-4"), std::string::npos) << status;
  EXPECT_TRUE(step->open());
  EXPECT_EQ(decoder.daemon->pins(), 1u);
  step->Abandon();
  EXPECT_EQ(decoder.daemon->pins(), 0u);
  EXPECT_EQ(track.sequence.tokens(), 0u);
}

TEST(Step, EndHasTheLastWordOnAStepThatWasRevoked) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  Sequence* batch[] = {&track.sequence};
  absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
  TESSERA_ASSERT_OK(step.status());
  decoder.daemon->RevokePins();
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    LayerRows rows(random, track.history.model(), layer, 1);
    EXPECT_TRUE(absl::IsAborted(step->AppendAndAttend(layer, rows.tensors())));
  }
  const absl::Status ended = step->End();
  EXPECT_TRUE(absl::IsAborted(ended));
  EXPECT_EQ(GetErrorInfo(ended).cause, ErrorCause::kPinRevoked);
  TESSERA_ASSERT_OK(decoder.RunStep(track));
}

TEST(Step, RefusesWhatDoesNotFit) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  Track other = decoder.NewTrack();
  Sequence* batch[] = {&track.sequence};
  EXPECT_TRUE(absl::IsInvalidArgument(decoder.worker->BeginStep({}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(decoder.worker->BeginStep(batch, {.new_tokens = 0}).status()));
  // A ring of 4 tiles, 31 tokens of which may wait until their tile is full.
  EXPECT_TRUE(
      absl::IsInvalidArgument(decoder.worker->BeginStep(batch, {.new_tokens = 98}).status()));
  Sequence* twice[] = {&track.sequence, &track.sequence};
  EXPECT_TRUE(absl::IsFailedPrecondition(decoder.worker->BeginStep(twice).status()));

  absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
  TESSERA_ASSERT_OK(step.status());
  EXPECT_TRUE(absl::IsFailedPrecondition(decoder.worker->BeginStep(batch).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(track.sequence.Truncate(0)));
  EXPECT_TRUE(absl::IsFailedPrecondition(track.sequence.Free()));
  LayerRows rows(random, track.history.model(), 0, 1);
  const std::span<const std::byte> key(rows.key);
  EXPECT_TRUE(absl::IsInvalidArgument(step->Append(2, key, rows.value)));
  const absl::Status small = step->Append(0, key.first(key.size() - 2), rows.value);
  EXPECT_TRUE(absl::IsInvalidArgument(small));
  EXPECT_NE(small.ToString().find("key has 254 bytes"), std::string::npos) << small;
  StepTensors tensors = rows.tensors();
  tensors.output_type = ElementType::kFp16;
  EXPECT_TRUE(absl::IsInvalidArgument(step->AppendAndAttend(0, tensors)));
  tensors = rows.tensors();
  tensors.lse = tensors.lse.first(3);
  EXPECT_TRUE(absl::IsInvalidArgument(step->AppendAndAttend(0, tensors)));
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    TESSERA_ASSERT_OK(step->AppendAndAttend(layer, rows.tensors()));
  }
  const std::uint32_t many[] = {2};
  EXPECT_TRUE(absl::IsInvalidArgument(step->End(many)));
  TESSERA_ASSERT_OK(step->End());
  EXPECT_FALSE(step->open());
  EXPECT_TRUE(absl::IsFailedPrecondition(step->End()));
}

TEST(Step, SixtyFourMayBeInFlightAndNoMore) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  std::vector<Track> tracks;
  std::vector<Step> steps;
  for (int i = 0; i < 65; ++i) tracks.push_back(decoder.NewTrack());
  for (int i = 0; i < 64; ++i) {
    Sequence* batch[] = {&tracks[static_cast<std::size_t>(i)].sequence};
    absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
    TESSERA_ASSERT_OK(step.status());
    steps.push_back(*std::move(step));
  }
  EXPECT_EQ(decoder.daemon->pins(), 64u);
  Sequence* last[] = {&tracks[64].sequence};
  const absl::Status no_slot = decoder.worker->BeginStep(last).status();
  EXPECT_TRUE(absl::IsResourceExhausted(no_slot));
  EXPECT_EQ(GetErrorInfo(no_slot).cause, ErrorCause::kReaderSlots);
  steps.pop_back();
  EXPECT_TRUE(decoder.worker->BeginStep(last).ok());
}

TEST(Step, AFullRingWaitsForTheDaemonAndThenSaysSo) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 5);
  for (int i = 0; i < 128; ++i) TESSERA_ASSERT_OK(decoder.RunStep(track));
  EXPECT_EQ(decoder.daemon->ring_full_waits(), 0u);
  EXPECT_EQ(decoder.daemon->step_waits(0), 128u);  // every step is counted
  // No absorption.
  const std::uint64_t wakes = decoder.daemon->wakes();
  const absl::Status status = decoder.RunStep(track, {.timeout = std::chrono::milliseconds(40)});
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(GetErrorInfo(status).cause, ErrorCause::kTailRingFull);
  EXPECT_NE(status.ToString().find("tail ring"), std::string::npos);
  EXPECT_NE(status.ToString().find("128 tokens"), std::string::npos) << status;
  EXPECT_EQ(decoder.daemon->ring_full_waits(), 1u);
  EXPECT_EQ(decoder.daemon->step_waits(4), 1u);  // it waited from 10 to 100 ms
  EXPECT_GT(decoder.daemon->wakes(), wakes);
  EXPECT_GE(decoder.sleeper.slept, std::chrono::milliseconds(40));
  EXPECT_LT(decoder.sleeper.slept, std::chrono::milliseconds(60));
  // The daemon absorbs while the step waits.
  decoder.sleeper.meanwhile = [&] {
    if (decoder.sleeper.sleeps % 3 == 0) decoder.daemon->Absorb();
  };
  for (int i = 0; i < 300; ++i) TESSERA_ASSERT_OK(decoder.RunStep(track));
  EXPECT_EQ(track.sequence.tokens(), 433u);
  EXPECT_GT(decoder.daemon->step_waits(0), 128u);
  std::uint32_t steps = 0;
  for (std::size_t i = 0; i < shm::kStepWaitBuckets; ++i) steps += decoder.daemon->step_waits(i);
  EXPECT_EQ(steps, 128u + 1u + 300u);
  EXPECT_GT(decoder.daemon->ring_full_waits(), 1u);
}

// A dense lane's tiles fill by token number; tiles after packed ones fill from where the tail was
// opened.
TEST(Step, WakesTheDaemonWhereATileFillsAndOnlyWhereItSleeps) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 7);
  const auto wakes_after = [&](int steps) {
    for (int i = 0; i < steps; ++i) EXPECT_TRUE(decoder.RunStep(track).ok());
    return decoder.daemon->wakes();
  };
  decoder.daemon->RequestWake();
  EXPECT_EQ(wakes_after(24), 0u);
  EXPECT_EQ(wakes_after(1), 1u);  // token 32
  EXPECT_FALSE(decoder.daemon->WakeAsked());
  decoder.daemon->RequestWake();
  EXPECT_EQ(wakes_after(6), 1u);
  EXPECT_EQ(wakes_after(1), 2u);   // 32 rows in the tail
  EXPECT_EQ(wakes_after(32), 2u);  // awake, so no signal is needed
  EXPECT_EQ(decoder.daemon->Absorb(), 64u);
}

TEST(Step, ExtentsComeAndGoUnderASteadyDecode) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  std::uint32_t most = 0;
  std::uint32_t dropped = 0;
  for (int round = 0; round < 12; ++round) {
    Track large = decoder.NewTrack();
    decoder.Prefill(large, 900);
    TESSERA_ASSERT_OK(decoder.RunStep(large));
    decoder.daemon->Republish();
    TESSERA_ASSERT_OK(decoder.RunStep(track));
    TESSERA_ASSERT_OK(decoder.RunStep(large));
    most = std::max(most, decoder.daemon->pool_extents());
    TESSERA_ASSERT_OK(large.sequence.Free());
    dropped += decoder.daemon->DropEmptyExtents();
    TESSERA_ASSERT_OK(decoder.RunStep(track));
    decoder.daemon->Absorb();
  }
  EXPECT_GT(most, 2u);
  EXPECT_GT(dropped, 10u);
}

TEST(Step, AFailedSequenceNamesTheDaemonsReason) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  TESSERA_ASSERT_OK(decoder.RunStep(track));
  decoder.daemon->FailSequence(track.sequence.id().value(), "K of layer 1, token 0 is NaN");
  const absl::Status status = decoder.RunStep(track);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.ToString().find("K of layer 1, token 0 is NaN"), std::string::npos) << status;
}

// Over RPC a failed step is undone by a truncation, and a full pool that refused the step may
// refuse that too.
TEST(Step, WhatCouldNotBeTakenBackIsCutOffBeforeAnythingElse) {
  const absl::Status full = absl::ResourceExhaustedError("no memory");
  enum class Next { kStep, kAppend, kFork, kTruncate };
  for (const Next next : {Next::kStep, Next::kAppend, Next::kFork, Next::kTruncate}) {
    TestRandom random;
    Decoder decoder(random, SmallModel(), {}, /*map_memory=*/false);
    Track track = decoder.NewTrack();
    decoder.Prefill(track, 70);
    decoder.daemon->FailNextAppend(full, /*after=*/1);  // the first layer has the token
    decoder.daemon->FailTruncates(full, 2);
    EXPECT_TRUE(absl::IsResourceExhausted(decoder.RunStep(track)));
    EXPECT_TRUE(absl::IsResourceExhausted(decoder.RunStep(track)));  // is refused as it begins
    EXPECT_EQ(track.sequence.tokens(), 70u);
    switch (next) {
      case Next::kAppend:
        decoder.Prefill(track, 5);
        break;
      case Next::kFork: {
        absl::StatusOr<Sequence> fork = track.sequence.Fork();
        TESSERA_ASSERT_OK(fork.status());
        Track child = {*std::move(fork), track.history};
        TESSERA_ASSERT_OK(decoder.RunStep(child));
        break;
      }
      case Next::kTruncate:
        TESSERA_ASSERT_OK(track.sequence.Truncate(60));
        track.history.Truncate(60);
        break;
      case Next::kStep:
        break;
    }
    TESSERA_ASSERT_OK(decoder.RunStep(track));
    EXPECT_EQ(track.sequence.tokens(), track.history.tokens());
  }
}

TEST(Step, AnEvictedSequenceIsNotFound) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  TESSERA_ASSERT_OK(decoder.RunStep(track));
  decoder.daemon->Evict(track.sequence.id().value());
  EXPECT_TRUE(absl::IsNotFound(decoder.RunStep(track)));
}

TEST(Step, ATailThatIsLostWhileTheStepRunsCommitsNothing) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  for (int i = 0; i < 40; ++i) {
    const bool close = random.OneIn(2);
    const absl::Status status = decoder.RunStep(track, {}, {}, [&](std::uint32_t layer) {
      if (close && layer == 1) decoder.daemon->CloseTailOf(track.sequence.id().value());
    });
    ASSERT_EQ(absl::IsAborted(status), close) << status;
    ASSERT_EQ(decoder.daemon->TokensOf(track.sequence.id().value()), track.history.tokens());
  }
  absl::Status status = decoder.RunStep(track, {}, {}, [&](std::uint32_t layer) {
    if (layer == 1) decoder.daemon->Evict(track.sequence.id().value());
  });
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_TRUE(absl::IsNotFound(decoder.RunStep(track)));
}

// Calls never fail because memory moves between steps, and a step in progress keeps its memory in
// place.
TEST(Step, OffloadedSequencesAreOpenedAnewAndStepsAreLeftAlone) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 70);
  const std::uint64_t id = track.sequence.id().value();
  for (int i = 0; i < 60; ++i) {
    if (random.OneIn(3)) {
      ASSERT_TRUE(decoder.daemon->OffloadAsDaemon(id));
    }
    TESSERA_ASSERT_OK(decoder.RunStep(
        track, {}, {}, [&](std::uint32_t) { ASSERT_FALSE(decoder.daemon->OffloadAsDaemon(id)); }));
    ASSERT_EQ(decoder.daemon->TokensOf(id), track.history.tokens());
  }
  // Steps that end differently release it, too.
  Sequence* batch[] = {&track.sequence};
  {
    absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
    TESSERA_ASSERT_OK(step.status());
    EXPECT_FALSE(decoder.daemon->OffloadAsDaemon(id));
  }
  EXPECT_TRUE(decoder.daemon->OffloadAsDaemon(id));
  const absl::Status aborted = decoder.RunStep(track, {}, {}, [&](std::uint32_t layer) {
    EXPECT_EQ(decoder.daemon->RevokePins(), layer == 0 ? 1u : 0u);
  });
  EXPECT_TRUE(absl::IsAborted(aborted)) << aborted;
  EXPECT_TRUE(decoder.daemon->OffloadAsDaemon(id));
  TESSERA_ASSERT_OK(decoder.RunStep(track));
}

TEST(Step, AChangeByAnotherWorkerIsTold) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  for (int i = 0; i < 40; ++i) TESSERA_ASSERT_OK(decoder.RunStep(track));
  {
    absl::StatusOr<std::unique_ptr<Worker>> other =
        AttachWith({.address = "fake:daemon"}, {}, decoder.daemon->NewConnector());
    TESSERA_ASSERT_OK(other.status());
    absl::StatusOr<Model> model = (*other)->RegisterModel(decoder.model.geometry());
    TESSERA_ASSERT_OK(model.status());
    // Sequences that another worker may not adopt.
    EXPECT_TRUE(absl::IsFailedPrecondition((*other)->Adopt(*model, track.sequence.id()).status()));
  }
  decoder.daemon->TruncateAsOther(track.sequence.id().value(), 10);
  track.history.Truncate(10);
  const absl::Status status = decoder.RunStep(track);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.ToString().find("10 tokens"), std::string::npos) << status;
  EXPECT_EQ(track.sequence.tokens(), 10u);
  TESSERA_ASSERT_OK(decoder.RunStep(track));
}

TEST(Step, HandsASequenceOverToAnotherWorker) {
  TestRandom random;
  Decoder decoder(random, SmallModel());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 50);
  TESSERA_ASSERT_OK(decoder.RunStep(track));
  absl::StatusOr<std::unique_ptr<Worker>> other =
      AttachWith({.address = "fake:daemon"}, {}, decoder.daemon->NewConnector());
  TESSERA_ASSERT_OK(other.status());
  absl::StatusOr<Model> model = (*other)->RegisterModel(decoder.model.geometry());
  TESSERA_ASSERT_OK(model.status());
  const SequenceId id = track.sequence.id();
  TESSERA_ASSERT_OK(track.sequence.Handover((*other)->session_id()));
  EXPECT_TRUE(absl::IsNotFound(decoder.RunStep(track)));
  absl::StatusOr<Sequence> adopted = (*other)->Adopt(*model, id);
  TESSERA_ASSERT_OK(adopted.status());
  EXPECT_EQ(adopted->tokens(), 51u);
  std::swap(decoder.worker, *other);
  track.sequence = *std::move(adopted);
  for (int i = 0; i < 40; ++i) TESSERA_ASSERT_OK(decoder.RunStep(track));
  std::swap(decoder.worker, *other);
}

}  // namespace
}  // namespace tessera::client
