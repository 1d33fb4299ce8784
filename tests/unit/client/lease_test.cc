// The lease: loss, drain and reattachment; and memory that is unmapped immediately.

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "client/api/worker_access.h"
#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

ModelGeometry LeasedModel() {
  ModelGeometry model;
  model.name = "small";
  model.layers.assign(2, {.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  return model;
}

// An event on another thread that a test waits for.
class Signal {
 public:
  void Set() {
    std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// A worker with callbacks.
struct Attached {
  explicit Attached(fakes::MappedDaemon& daemon, bool automatic = false) : sleeper(clock) {
    AttachOptions options;
    options.address = "fake:daemon";
    options.reattach.automatic = automatic;
    options.on_lease_lost = [this](const absl::Status& why) {
      reason = why;
      lost.Set();
    };
    options.on_draining = [this](Clock::Duration limit) {
      drain_limit = limit;
      draining.Set();
    };
    options.on_reattached = [this](const ReattachReport& got) {
      report = got;
      reattached.Set();
    };
    absl::StatusOr<std::unique_ptr<Worker>> made =
        AttachWith(options, {.clock = &clock, .sleeper = &sleeper}, daemon.NewConnector());
    EXPECT_TRUE(made.ok()) << made.status();
    worker = *std::move(made);
  }

  FakeClock clock;
  FakeSleeper sleeper;
  Signal lost, draining, reattached;
  absl::Status reason;
  Clock::Duration drain_limit{0};
  ReattachReport report;
  std::unique_ptr<Worker> worker;
};

int MappingsOfTheDaemon() {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  EXPECT_NE(maps, nullptr);
  char line[512];
  int read_only = 0;
  while (std::fgets(line, sizeof line, maps) != nullptr) {
    // Only the client maps the fake daemon's pool and directory read-only.
    if (std::strstr(line, "tessera-fake") != nullptr && std::strstr(line, " r--s ") != nullptr) {
      ++read_only;
    }
  }
  std::fclose(maps);
  return read_only;
}

TEST(Lease, LossUnmapsEverythingAtOnceAndNamesTheReason) {
  TestRandom random;
  fakes::MappedDaemon daemon({.seed = random.Bits()});
  Attached attached(daemon);
  absl::StatusOr<Model> model = attached.worker->RegisterModel(LeasedModel());
  TESSERA_ASSERT_OK(model.status());
  absl::StatusOr<Sequence> sequence = attached.worker->CreateSequence(*model);
  TESSERA_ASSERT_OK(sequence.status());
  Sequence* batch[] = {&*sequence};
  const BoundModel bound(ModelId(1), LeasedModel(), 4);
  LayerRows rows(random, bound, 0, 1);
  {
    absl::StatusOr<Step> step = attached.worker->BeginStep(batch);
    TESSERA_ASSERT_OK(step.status());
    for (std::uint32_t i = 0; i < 2; ++i)
      TESSERA_ASSERT_OK(step->AppendAndAttend(i, rows.tensors()));
    TESSERA_ASSERT_OK(step->End());
  }
  absl::StatusOr<Step> step = attached.worker->BeginStep(batch);
  TESSERA_ASSERT_OK(step.status());
  EXPECT_GT(MappingsOfTheDaemon(), 0);

  daemon.EndLeases(absl::UnavailableError("the power is going"), true);
  attached.lost.Wait();
  EXPECT_EQ(MappingsOfTheDaemon(), 0);
  EXPECT_NE(attached.reason.ToString().find("the power is going"), std::string::npos);
  for (const absl::Status& status :
       {step->AppendAndAttend(0, rows.tensors()), attached.worker->status(),
        attached.worker->BeginStep(batch).status(), sequence->Truncate(0),
        attached.worker->Stats().status(), sequence->Describe().status()}) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(GetErrorInfo(status).cause, ErrorCause::kLeaseLost) << status;
    EXPECT_NE(status.ToString().find("the power is going"), std::string::npos) << status;
  }
  EXPECT_FALSE(step->open());
  EXPECT_FALSE(attached.worker->mapped());
}

// An executor that stops in the middle of an attention call until the test continues it.
class StoppingExecutor final : public Executor {
 public:
  void ParallelFor(std::uint32_t tasks, Task task, void* context) override {
    inside.Set();
    go_on.Wait();
    for (std::uint32_t i = 0; i < tasks; ++i) task(context, i);
  }
  Signal inside;
  Signal go_on;
};

TEST(Lease, ACallInFlightKeepsItsMemoryUntilItReturns) {
  TestRandom random;
  Decoder decoder(random, LeasedModel());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 100);
  TESSERA_ASSERT_OK(decoder.RunStep(track));
  StoppingExecutor executor;
  Sequence* batch[] = {&track.sequence};
  absl::StatusOr<Step> step = decoder.worker->BeginStep(batch, {.executor = &executor});
  TESSERA_ASSERT_OK(step.status());
  LayerRows rows(random, track.history.model(), 0, 1);
  absl::Status attended;
  std::thread worker([&] { attended = step->AppendAndAttend(0, rows.tensors()); });
  executor.inside.Wait();
  decoder.daemon->EndLeases(absl::UnavailableError("gone"), true);
  // The loss is noticed and later calls are refused, but this call's memory is still mapped.
  while (decoder.worker->status().ok()) std::this_thread::yield();
  EXPECT_TRUE(absl::IsUnavailable(decoder.RunStep(track)));
  EXPECT_GT(MappingsOfTheDaemon(), 0);
  executor.go_on.Set();
  worker.join();
  // Its memory was no longer protected: the call may succeed, or notice the loss.
  EXPECT_TRUE(attended.ok() || absl::IsUnavailable(attended)) << attended;
  while (MappingsOfTheDaemon() > 0) std::this_thread::yield();
  EXPECT_TRUE(absl::IsUnavailable(step->AppendAndAttend(1, rows.tensors())));
}

TEST(Lease, ReattachTellsWhatIsGoneAndRegistersModelsAgain) {
  TestRandom random;
  Decoder decoder(random, LeasedModel());
  Track track = decoder.NewTrack();
  Track freed = decoder.NewTrack();
  TESSERA_ASSERT_OK(freed.sequence.Free());
  decoder.Prefill(track, 40);
  const SequenceId id = track.sequence.id();
  decoder.daemon->EndLeases(absl::UnavailableError("restart"), true);
  while (decoder.worker->status().ok()) std::this_thread::yield();
  absl::StatusOr<ReattachReport> report = decoder.worker->Reattach();
  TESSERA_ASSERT_OK(report.status());
  EXPECT_FALSE(report->same_daemon);
  EXPECT_EQ(report->attempts, 1u);
  EXPECT_EQ(report->gone, std::vector<SequenceId>{id});
  ASSERT_EQ(decoder.daemon->last_hello().sequence_ids_size(), 1);
  EXPECT_EQ(decoder.daemon->last_hello().sequence_ids(0), id.value());
  EXPECT_NE(decoder.daemon->last_hello().previous_instance(), 0u);
  for (const absl::Status& status :
       {decoder.RunStep(track), track.sequence.Truncate(0), track.sequence.Describe().status()}) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_NE(status.ToString().find("gone with the daemon"), std::string::npos) << status;
  }
  // The old model handle still works.
  Track next = decoder.NewTrack();
  decoder.Prefill(next, 33);
  for (int i = 0; i < 40; ++i) TESSERA_ASSERT_OK(decoder.RunStep(next));
}

TEST(Lease, ReattachBacksOffAndGivesUp) {
  TestRandom random;
  Decoder decoder(random, LeasedModel());
  decoder.daemon->RefuseAttach(absl::UnavailableError("starting"));
  decoder.daemon->EndLeases(absl::UnavailableError("restart"), true);
  while (decoder.worker->status().ok()) std::this_thread::yield();
  absl::StatusOr<ReattachReport> report = decoder.worker->Reattach();
  EXPECT_TRUE(absl::IsUnavailable(report.status())) << report.status();
  EXPECT_NE(report.status().ToString().find("gave up after"), std::string::npos);
  EXPECT_LE(decoder.sleeper.slept, std::chrono::seconds(60));
  EXPECT_GT(decoder.sleeper.slept, std::chrono::seconds(50));
  // The pause doubles from 0.1 s to 5 s: about a dozen attempts per minute.
  const std::string text = report.status().ToString();
  const std::size_t at = text.find("gave up after ") + std::string("gave up after ").size();
  const int attempts = std::atoi(text.c_str() + at);
  EXPECT_GE(attempts, 14);
  EXPECT_LE(attempts, 32);

  // A permanent refusal is reported at once.
  decoder.daemon->RefuseAttach(absl::PermissionDeniedError("unknown token"));
  const Clock::Duration before = decoder.sleeper.slept;
  report = decoder.worker->Reattach();
  EXPECT_TRUE(absl::IsPermissionDenied(report.status())) << report.status();
  EXPECT_EQ(decoder.sleeper.slept, before);
  decoder.daemon->RefuseAttach(absl::OkStatus());
  TESSERA_ASSERT_OK(decoder.worker->Reattach().status());
}

TEST(Lease, ReattachesUnaskedWhereItMay) {
  TestRandom random;
  fakes::MappedDaemon daemon({.seed = random.Bits()});
  Attached attached(daemon, /*automatic=*/true);
  absl::StatusOr<Model> model = attached.worker->RegisterModel(LeasedModel());
  TESSERA_ASSERT_OK(model.status());
  absl::StatusOr<Sequence> sequence = attached.worker->CreateSequence(*model);
  TESSERA_ASSERT_OK(sequence.status());
  daemon.EndLeases(absl::UnavailableError("restart"), true);
  attached.reattached.Wait();
  EXPECT_EQ(attached.report.gone.size(), 1u);
  TESSERA_ASSERT_OK(attached.worker->status());
  EXPECT_TRUE(attached.worker->mapped());
  TESSERA_ASSERT_OK(attached.worker->CreateSequence(*model).status());
}

TEST(Lease, DrainingIsTold) {
  TestRandom random;
  fakes::MappedDaemon daemon({.seed = random.Bits()});
  Attached attached(daemon);
  EXPECT_FALSE(attached.worker->draining());
  daemon.AnnounceDrain(1500);
  attached.draining.Wait();
  EXPECT_TRUE(attached.worker->draining());
  EXPECT_EQ(attached.drain_limit, std::chrono::milliseconds(1500));
}

TEST(Lease, AWorkerLeavesADaemonThatReadsNothing) {
  TestRandom random;
  fakes::MappedDaemon daemon({.seed = random.Bits()});
  Attached attached(daemon);
  daemon.StallGoodbyes();
  attached.worker = nullptr;  // hangs unless the goodbye is given up
}

TEST(Lease, HandlesOutliveTheWorker) {
  TestRandom random;
  Decoder decoder(random, LeasedModel());
  Track track = decoder.NewTrack();
  Sequence* batch[] = {&track.sequence};
  absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
  TESSERA_ASSERT_OK(step.status());
  decoder.worker = nullptr;
  EXPECT_EQ(decoder.daemon->sequences(), 0u);
  LayerRows rows(random, track.history.model(), 0, 1);
  const absl::Status status = step->Append(0, rows.key, rows.value);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.ToString().find("detached"), std::string::npos) << status;
  EXPECT_TRUE(absl::IsUnavailable(track.sequence.Park()));
}

// Many threads decode while the daemon moves memory, revokes pins and finally exits.
TEST(Lease, ThreadsDecodeUntilTheDaemonGoes) {
  TestRandom random;
  for (int round = 0; round < 3; ++round) {
    Decoder decoder(random, LeasedModel(), {.ring_tiles = 8});
    constexpr int kThreads = 4;
    std::atomic<int> steps{0};
    std::atomic<int> strangers{0};
    std::vector<Track> tracks;
    for (int i = 0; i < kThreads; ++i) tracks.push_back(decoder.NewTrack());
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i, seed = random.Bits()] {
        TestRandom own(seed);
        Track& track = tracks[static_cast<std::size_t>(i)];
        Sequence* batch[] = {&track.sequence};
        const BoundModel& bound = track.history.model();
        for (;;) {
          absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
          absl::Status status = step.status();
          std::vector<LayerRows> layers;
          for (std::uint32_t layer = 0; status.ok() && layer < bound.layers(); ++layer) {
            layers.emplace_back(own, bound, layer, 1);
            status = step->AppendAndAttend(layer, layers.back().tensors());
          }
          if (status.ok()) status = step->End();
          if (status.ok()) {
            for (std::uint32_t layer = 0; layer < bound.layers(); ++layer) {
              track.history.Append(layer, layers[layer].key, layers[layer].value);
              track.history.Check(layer, track.history.tokens(layer) - 1, 1, true,
                                  layers[layer].query.data(), layers[layer].output.data(),
                                  layers[layer].lse.data());
            }
            ++steps;
          } else if (absl::IsUnavailable(status)) {
            return;
          } else if (!absl::IsAborted(status) && !absl::IsResourceExhausted(status)) {
            ADD_FAILURE() << status;
            ++strangers;
            return;
          }
        }
      });
    }
    while (steps < 400 && strangers == 0) {
      decoder.daemon->Absorb();
      decoder.daemon->Republish();
      decoder.daemon->DropEmptyExtents();
      if (random.OneIn(20)) decoder.daemon->RevokePins();
      decoder.daemon->Collect();
    }
    decoder.daemon->EndLeases(absl::UnavailableError("gone"), true);
    for (std::thread& thread : threads) thread.join();
    EXPECT_GE(steps, 400);
  }
}

}  // namespace
}  // namespace tessera::client
