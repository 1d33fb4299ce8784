// A worker under test with a fake daemon, and the expected history of each of its sequences.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "gtest/gtest.h"
#include "tessera/worker.h"
#include "tests/fakes/daemon/mapped_daemon.h"
#include "tests/fakes/fake_clock.h"
#include "tests/fakes/seed.h"
#include "tests/unit/client/history.h"

namespace tessera::client {

// Advances the fake clock, and runs the test's hook in the meantime.
class FakeSleeper final : public Sleeper {
 public:
  explicit FakeSleeper(FakeClock& clock) : clock_(clock) {}
  void Sleep(Clock::Duration duration) override {
    clock_.Advance(duration);
    ++sleeps;
    slept += duration;
    if (meanwhile) meanwhile();
  }
  std::function<void()> meanwhile;
  std::uint64_t sleeps = 0;
  Clock::Duration slept{0};

 private:
  FakeClock& clock_;
};

#define TESSERA_ASSERT_OK(expression)                              \
  do {                                                             \
    const absl::Status tessera_status = (expression);              \
    ASSERT_TRUE(tessera_status.ok()) << tessera_status.ToString(); \
  } while (false)

struct Track {
  Sequence sequence;
  History history;
};

// The rows of one layer of a step, for a batch.
struct LayerRows {
  LayerRows(TestRandom& random, const BoundModel& model, std::uint32_t layer, std::uint64_t rows)
      : key(RandomRows(random, rows * KvElements(model, layer), model.type())),
        value(RandomRows(random, rows * KvElements(model, layer), model.type())),
        query(RandomRows(random, rows * QueryElements(model, layer), model.type())),
        output(rows * QueryElements(model, layer)),
        lse(rows * model.geometry(layer).query_heads) {}

  static std::size_t KvElements(const BoundModel& model, std::uint32_t layer) {
    return std::size_t{model.geometry(layer).kv_heads} * model.geometry(layer).head_dim;
  }
  static std::size_t QueryElements(const BoundModel& model, std::uint32_t layer) {
    return std::size_t{model.geometry(layer).query_heads} * model.geometry(layer).head_dim;
  }
  StepTensors tensors(bool causal = true) {
    return {.key = key,
            .value = value,
            .query = query,
            .output = std::as_writable_bytes(std::span(output)),
            .lse = lse,
            .causal = causal};
  }

  std::vector<std::byte> key;
  std::vector<std::byte> value;
  std::vector<std::byte> query;
  std::vector<float> output;
  std::vector<float> lse;
};

class Decoder {
 public:
  Decoder(TestRandom& random, const ModelGeometry& geometry,
          fakes::MappedDaemon::Options daemon_options = {}, bool map_memory = true)
      : random_(random), sleeper(clock), geometry_(geometry) {
    daemon_options.seed = random.Bits();
    daemon = std::make_unique<fakes::MappedDaemon>(daemon_options);
    AttachOptions options;
    options.address = "fake:daemon";
    options.map_memory = map_memory;
    absl::StatusOr<std::unique_ptr<Worker>> attached =
        AttachWith(options, {.clock = &clock, .sleeper = &sleeper}, daemon->NewConnector());
    EXPECT_TRUE(attached.ok()) << attached.status();
    worker = *std::move(attached);
    EXPECT_EQ(worker->mapped(), map_memory && daemon_options.offer_mapping);
    absl::StatusOr<Model> registered = worker->RegisterModel(geometry);
    EXPECT_TRUE(registered.ok()) << registered.status();
    model = *registered;
  }

  Track NewTrack() {
    absl::StatusOr<Sequence> sequence = worker->CreateSequence(model);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return {*std::move(sequence), History(geometry_)};
  }

  // Appends the same number of tokens to every layer, layer by layer.
  void Prefill(Track& track, std::uint64_t tokens) {
    const BoundModel& bound = track.history.model();
    for (std::uint32_t layer = 0; layer < bound.layers(); ++layer) {
      const std::size_t elements = tokens * LayerRows::KvElements(bound, layer);
      const std::vector<std::byte> key = RandomRows(random_, elements, bound.type());
      const std::vector<std::byte> value = RandomRows(random_, elements, bound.type());
      absl::StatusOr<std::uint64_t> held = track.sequence.Append(
          {.key = key, .value = value, .tokens = tokens, .first_layer = layer, .layers = 1});
      TESSERA_ASSERT_OK(held.status());
      track.history.Append(layer, key, value);
    }
    ASSERT_EQ(track.sequence.tokens(), track.history.tokens());
  }

  // Runs one step of the batch and updates the histories. `between` is called before each layer.
  absl::Status RunStep(std::span<Track* const> tracks, StepOptions options = {},
                       std::vector<std::uint32_t> accepted = {},
                       const std::function<void(std::uint32_t)>& between = nullptr) {
    std::vector<Sequence*> batch;
    for (Track* track : tracks) batch.push_back(&track->sequence);
    absl::StatusOr<Step> step = worker->BeginStep(batch, options);
    if (!step.ok()) return step.status();
    std::vector<History> histories;
    for (Track* track : tracks) histories.push_back(track->history);
    std::vector<std::uint32_t> counts(options.new_tokens_each.begin(),
                                      options.new_tokens_each.end());
    if (counts.empty()) counts.assign(tracks.size(), options.new_tokens);
    std::uint64_t rows = 0;
    for (std::uint32_t count : counts) rows += count;

    std::vector<LayerRows> layers;
    const BoundModel& bound = tracks[0]->history.model();
    const bool causal = !random_.OneIn(4);
    for (std::uint32_t layer = 0; layer < bound.layers(); ++layer) {
      layers.emplace_back(random_, bound, layer, rows);
      if (between) between(layer);
      absl::Status status = step->AppendAndAttend(layer, layers.back().tensors(causal));
      if (!status.ok()) return status;
    }
    if (between) between(bound.layers());
    if (absl::Status status = step->End(accepted); !status.ok()) return status;
    // The tokens of the step count from here on.
    for (std::uint32_t layer = 0; layer < bound.layers(); ++layer) {
      LayerRows& computed = layers[layer];
      std::size_t first = 0;
      for (std::size_t i = 0; i < tracks.size(); ++i) {
        const std::size_t token = bound.token_bytes(layer);
        History& history = histories[i];
        const std::uint64_t base = history.tokens(layer);
        history.Append(layer, std::span(computed.key).subspan(first * token, counts[i] * token),
                       std::span(computed.value).subspan(first * token, counts[i] * token));
        const std::size_t elements = LayerRows::QueryElements(bound, layer);
        history.Check(
            layer, base, counts[i], causal,
            computed.query.data() + first * elements * kernels::ElementBytes(bound.type()),
            computed.output.data() + first * elements,
            computed.lse.data() + first * bound.geometry(layer).query_heads);
        if (testing::Test::HasFatalFailure()) return absl::OkStatus();
        first += counts[i];
      }
    }
    for (std::size_t i = 0; i < tracks.size(); ++i) {
      const std::uint64_t base = tracks[i]->history.tokens();
      histories[i].Truncate(base + (accepted.empty() ? counts[i] : accepted[i]));
      tracks[i]->history = histories[i];
      EXPECT_EQ(tracks[i]->sequence.tokens(), tracks[i]->history.tokens());
    }
    return absl::OkStatus();
  }
  absl::Status RunStep(Track& track, StepOptions options = {},
                       std::vector<std::uint32_t> accepted = {},
                       const std::function<void(std::uint32_t)>& between = nullptr) {
    Track* const tracks[] = {&track};
    return RunStep(tracks, options, std::move(accepted), between);
  }

 private:
  TestRandom& random_;

 public:
  FakeClock clock;
  FakeSleeper sleeper;
  std::unique_ptr<fakes::MappedDaemon> daemon;
  std::unique_ptr<Worker> worker;
  Model model;

 private:
  const ModelGeometry geometry_;
};

}  // namespace tessera::client
