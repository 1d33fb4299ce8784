// The victim of death_test: a worker that repeats one operation until it is killed.
//
//   death_worker ADDRESS PHASE_FILE attach|append|step|fork|compress|offload   until killed
//   death_worker ADDRESS PHASE_FILE compute  claims to compute a prefix, and never does
//   death_worker ADDRESS PHASE_FILE stop     stops itself inside a step until it is continued

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "client/bench/workload/synthetic.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"
#include "tests/e2e/death_phase.h"

namespace tessera {
namespace {

using cli::BytesOf;
using cli::SyntheticSequence;
using cli::SyntheticShape;
using cli::WritableBytesOf;

constexpr SyntheticShape kShape = {.layers = 4, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::uint64_t kPrompt = 300;

[[noreturn]] void Die(const absl::Status& status) {
  std::fprintf(stderr, "death_worker: %s\n", std::string(AsStringView(status.message())).c_str());
  std::_Exit(1);
}
template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status());
  return *std::move(value);
}
void Must(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

std::unique_ptr<client::Worker> Attach(const std::string& address) {
  return Must(client::Worker::Attach({.address = address, .worker_name = "victim"}));
}

void Append(client::Sequence& sequence, const SyntheticSequence& truth, std::uint64_t first,
            std::uint64_t count) {
  const std::vector<std::uint16_t> key = truth.KeysOfAllLayers(first, count);
  const std::vector<std::uint16_t> value = truth.ValuesOfAllLayers(first, count);
  Must(sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = count}).status());
}

// Runs one step of one sequence. `between` runs after the second layer.
template <typename Between>
absl::Status OneStep(client::Worker& worker, client::Sequence& sequence,
                     const SyntheticSequence& truth, std::vector<float>& output, Between between) {
  client::Sequence* batch[] = {&sequence};
  absl::StatusOr<client::Step> step = worker.BeginStep(batch);
  if (!step.ok()) return step.status();
  const std::uint64_t token = truth.tokens() - 1;
  output.resize(kShape.query_row());
  for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
    const std::vector<std::uint16_t> query = truth.Query(layer, token);
    absl::Status status =
        step->AppendAndAttend(layer, {.key = BytesOf(truth.Key(layer, token, 1)),
                                      .value = BytesOf(truth.Value(layer, token, 1)),
                                      .query = BytesOf(query),
                                      .output = WritableBytesOf(output)});
    if (!status.ok()) return status;
    if (layer == 1) between();
  }
  return step->End();
}

// One matrix per lane, in bf16.
std::vector<std::byte> Identities() {
  const std::size_t dim = kShape.head_dim;
  std::vector<std::uint16_t> values(kShape.layers * kShape.kv_heads * dim * dim);
  for (std::size_t row = 0; row < values.size() / dim; ++row) {
    values[row * dim + row % dim] = kernels::FloatToBf16(1.0f);
  }
  const std::span<const std::byte> bytes = BytesOf(values);
  return {bytes.begin(), bytes.end()};
}

void AttachForEver(const std::string& address, PhaseWord& phase) {
  for (;;) {
    const InPhase inside(phase, Phase::kAttach);
    Attach(address);
  }
}

void WorkForEver(const std::string& what, const std::string& address, PhaseWord& phase) {
  const std::unique_ptr<client::Worker> worker = Attach(address);
  const client::Model model = Must(worker->RegisterModel(kShape.Geometry()));
  client::Sequence sequence = Must(worker->CreateSequence(model));
  SyntheticSequence truth(kShape, 7);
  truth.Grow(kPrompt);
  Append(sequence, truth, 0, kPrompt);
  std::vector<float> output;
  const auto decode = [&] {
    truth.Grow(1);
    absl::Status status;
    do {
      status = OneStep(*worker, sequence, truth, output, [] {});
    } while (absl::IsAborted(status));
    Must(status);
  };
  for (int i = 0; i < 40; ++i) decode();  // an open tail, partly absorbed
  const std::vector<std::byte> rotations = Identities();
  for (;;) {
    if (what == "append") {
      truth.Grow(200);
      {
        const InPhase inside(phase, Phase::kAppend);
        Append(sequence, truth, truth.tokens() - 200, 200);
      }
      if (truth.tokens() > 2000) {
        Must(sequence.Truncate(kPrompt));
        truth.Truncate(kPrompt);
      }
    } else if (what == "step") {
      const InPhase inside(phase, Phase::kStep);
      decode();
    } else if (what == "compress") {
      client::Sequence child = Must(sequence.Fork());
      const InPhase inside(phase, Phase::kCompress);
      Must(child
               .Compress({.kept_channels = 16, .summary = client::Summary::kMean},
                         {.key = rotations, .value = rotations})
               .status());
    } else if (what == "offload") {
      // Offloads and restores: a kill may hit either, or fall in between.
      const InPhase inside(phase, Phase::kOffload);
      Must(sequence.Offload().status());
      decode();
    } else {
      const InPhase inside(phase, Phase::kFork);
      client::Sequence child = Must(sequence.Fork());
    }
  }
}

[[noreturn]] void SayThatItComputes(const std::string& address, PhaseWord& phase) {
  const std::unique_ptr<client::Worker> worker = Attach(address);
  const client::Model model = Must(worker->RegisterModel(kShape.Geometry()));
  std::vector<std::uint32_t> ids(256);
  std::iota(ids.begin(), ids.end(), 0u);
  Must(worker->Match(model, {.tokens = ids, .will_compute = true}).status());
  phase.Set(Phase::kCompute);
  for (;;) ::pause();
}

// Exits with 0 if the stopped step was ABORTED and the retried step gave the right result.
int StopInsideAStep(const std::string& address, PhaseWord& phase) {
  const std::unique_ptr<client::Worker> worker = Attach(address);
  const client::Model model = Must(worker->RegisterModel(kShape.Geometry()));
  client::Sequence sequence = Must(worker->CreateSequence(model));
  SyntheticSequence truth(kShape, 7);
  truth.Grow(kPrompt);
  Append(sequence, truth, 0, kPrompt);
  truth.Grow(1);
  std::vector<float> output;
  const absl::Status stopped = OneStep(*worker, sequence, truth, output, [&] {
    phase.Set(Phase::kStep);
    ::raise(SIGSTOP);
  });
  if (!absl::IsAborted(stopped)) {
    std::fprintf(stderr, "the stopped step ended with: %s\n", stopped.ToString().c_str());
    return 2;
  }
  if (sequence.tokens() != kPrompt) return 3;
  Must(OneStep(*worker, sequence, truth, output, [] {}));
  const double error = truth.Error(kShape.layers - 1, kPrompt, output);
  if (!(error < 0.02)) {
    std::fprintf(stderr, "after the retry the output is off by %g\n", error);
    return 4;
  }
  return sequence.tokens() == kPrompt + 1 ? 0 : 5;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (argc != 4) return 64;
  tessera::PhaseWord phase(argv[2]);
  const std::string what = argv[3];
  if (what == "stop") return tessera::StopInsideAStep(argv[1], phase);
  if (what == "compute") tessera::SayThatItComputes(argv[1], phase);
  if (what == "attach") tessera::AttachForEver(argv[1], phase);
  tessera::WorkForEver(what, argv[1], phase);
}
