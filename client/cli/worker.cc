// tessera worker: prefills, decodes and forks through a daemon with a synthetic model, and compares
// every attention output with exact attention over the worker's own copy of K and V.

#include "tessera/worker.h"

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/workload/synthetic.h"
#include "client/cli/command.h"
#include "client/tools/admin.h"
#include "client/tools/connection.h"
#include "client/tools/output.h"
#include "client/tools/report.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// Allowed difference of dense attention in bf16 (K, V, Q, probabilities) from double precision.
constexpr double kTolerance = 0.02;

struct Plan {
  Door door;
  std::string name;
  bool mapped = true;
  std::uint64_t sequences = 0;
  std::uint64_t prompt = 0;
  std::uint64_t steps = 0;
  std::uint64_t check_every = 0;
  std::uint64_t seed = 0;
};

absl::StatusOr<Plan> ReadPlan(const Flags& flags) {
  Plan plan;
  plan.door = ConnectionOf(flags);
  plan.name = flags.Get("name");
  const std::string& transport = flags.Get("transport");
  if (transport != "mapped" && transport != "rpc") {
    return absl::InvalidArgumentError(
        Concat("--transport is \"", transport, "\"; it must be mapped or rpc"));
  }
  plan.mapped = transport == "mapped";
  struct Number {
    const char* name;
    std::uint64_t* place;
    std::uint64_t min;
    std::uint64_t max;
  };
  for (const Number& number :
       {Number{"sequences", &plan.sequences, 1, 256}, Number{"prompt", &plan.prompt, 1, 100000},
        Number{"steps", &plan.steps, 1, 100000},
        Number{"check-every", &plan.check_every, 1, 100000},
        Number{"seed", &plan.seed, 0, ~std::uint64_t{0}}}) {
    absl::StatusOr<std::uint64_t> value = flags.Number(number.name, number.min, number.max);
    if (!value.ok()) return value.status();
    *number.place = *value;
  }
  return plan;
}

// Totals of a run.
struct Outcome {
  std::uint64_t prefilled = 0;
  std::uint64_t decoded = 0;
  std::uint64_t checks = 0;
  std::uint64_t retries = 0;
  double worst_error = 0;
  std::vector<double> step_us;
  std::string tile_bytes;
};

struct LayerTensors {
  client::Tensor key, value, query, output;
};

class SyntheticWorker {
 public:
  SyntheticWorker(const Plan& plan, client::Worker& worker) : plan_(plan), worker_(worker) {}

  absl::Status Run(Outcome& outcome) {
    absl::StatusOr<client::Model> model = worker_.RegisterModel(shape_.Geometry());
    if (!model.ok()) return model.status();
    for (std::uint64_t i = 0; i < plan_.sequences; ++i) {
      absl::StatusOr<client::Sequence> sequence = worker_.CreateSequence(*model);
      if (!sequence.ok()) return sequence.status();
      sequences_.push_back(*std::move(sequence));
      truths_.emplace_back(shape_, plan_.seed * 1000 + i);
      if (absl::Status status = Prefill(i, outcome); !status.ok()) return status;
    }
    absl::Status status = Decode(plan_.steps, outcome);
    if (!status.ok()) return status;
    // A fork shares its parent's segments and diverges from here.
    absl::StatusOr<client::Sequence> fork = sequences_.front().Fork();
    if (!fork.ok()) return fork.status();
    sequences_.push_back(*std::move(fork));
    truths_.push_back(truths_.front().Fork(plan_.seed * 1000 + 999));
    status = Decode(std::max<std::uint64_t>(1, plan_.steps / 8), outcome);
    if (!status.ok()) return status;
    absl::StatusOr<client::SequenceDescription> description = sequences_.back().Describe();
    if (!description.ok()) return description.status();
    outcome.tile_bytes = Concat(FormatBytes(description->tile_bytes), ", ",
                                FormatBytes(description->shared_tile_bytes), " of it shared");
    return absl::OkStatus();
  }

 private:
  absl::Status Prefill(std::uint64_t i, Outcome& outcome) {
    truths_[i].Grow(plan_.prompt);
    const std::vector<std::uint16_t> key = truths_[i].KeysOfAllLayers(0, plan_.prompt);
    const std::vector<std::uint16_t> value = truths_[i].ValuesOfAllLayers(0, plan_.prompt);
    outcome.prefilled += plan_.prompt;
    return sequences_[i]
        .Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = plan_.prompt})
        .status();
  }

  absl::Status Decode(std::uint64_t steps, Outcome& outcome) {
    for (std::uint64_t step = 0; step < steps; ++step) {
      for (SyntheticSequence& truth : truths_) truth.Grow(1);
      absl::Status status;
      do {
        const auto begun = std::chrono::steady_clock::now();
        status = OneStep();
        outcome.step_us.push_back(
            std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begun)
                .count());
        outcome.retries += absl::IsAborted(status);
      } while (absl::IsAborted(status));  // the daemon revoked the pin: retry the step
      if (!status.ok()) return status;
      outcome.decoded += sequences_.size();
      if (step % plan_.check_every != 0 && step + 1 != steps) continue;
      if (absl::Status checked = Check(outcome); !checked.ok()) return checked;
    }
    return absl::OkStatus();
  }

  absl::Status OneStep() {
    std::vector<client::Sequence*> batch;
    for (client::Sequence& sequence : sequences_) batch.push_back(&sequence);
    absl::StatusOr<client::Step> step = worker_.BeginStep(batch);
    if (!step.ok()) return step.status();
    outputs_.assign(shape_.layers, std::vector<float>(batch.size() * shape_.query_row()));
    if (absl::Status status = MakeTensors(batch.size()); !status.ok()) return status;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      LayerTensors& tensors = tensors_[layer];
      absl::Status status = Gather(layer, tensors);
      if (status.ok()) {
        status = step->AppendAndAttend(layer, {.key = tensors.key.bytes(),
                                               .value = tensors.value.bytes(),
                                               .query = tensors.query.bytes(),
                                               .output = tensors.output.bytes()});
      }
      if (!status.ok()) return status;
    }
    if (absl::Status status = step->End(); !status.ok()) return status;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      absl::Status status = tensors_[layer].output.Read(WritableBytesOf(outputs_[layer]));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // One set per layer: a GPU may still read the previous layer's tensors.
  absl::Status MakeTensors(std::size_t batch) {
    if (batch == tensors_of_batch_) return absl::OkStatus();
    tensors_.clear();
    tensors_of_batch_ = batch;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      absl::StatusOr<client::Tensor> key = worker_.NewTensor(2 * batch * shape_.kv_row());
      absl::StatusOr<client::Tensor> value = worker_.NewTensor(2 * batch * shape_.kv_row());
      absl::StatusOr<client::Tensor> query = worker_.NewTensor(2 * batch * shape_.query_row());
      absl::StatusOr<client::Tensor> output = worker_.NewTensor(4 * batch * shape_.query_row());
      for (const absl::Status& status :
           {key.status(), value.status(), query.status(), output.status()}) {
        if (!status.ok()) return status;
      }
      tensors_.push_back(
          {*std::move(key), *std::move(value), *std::move(query), *std::move(output)});
    }
    return absl::OkStatus();
  }

  // Writes the batch's rows of one layer, as a model would compute them.
  absl::Status Gather(std::uint32_t layer, LayerTensors& tensors) {
    key_.clear();
    value_.clear();
    query_.clear();
    for (const SyntheticSequence& truth : truths_) {
      const std::uint64_t token = truth.tokens() - 1;
      const auto add = [](std::vector<std::uint16_t>& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      add(key_, truth.Key(layer, token, 1));
      add(value_, truth.Value(layer, token, 1));
      add(query_, truth.Query(layer, token));
    }
    absl::Status status = tensors.key.Write(BytesOf(key_));
    if (status.ok()) status = tensors.value.Write(BytesOf(value_));
    return status.ok() ? tensors.query.Write(BytesOf(query_)) : status;
  }

  absl::Status Check(Outcome& outcome) {
    for (std::size_t i = 0; i < truths_.size(); ++i) {
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const double error = truths_[i].Error(
            layer, truths_[i].tokens() - 1,
            std::span(outputs_[layer]).subspan(i * shape_.query_row(), shape_.query_row()));
        ++outcome.checks;
        outcome.worst_error = error <= outcome.worst_error ? outcome.worst_error : error;
        if (!(error <= kTolerance)) {
          return absl::DataLossError(Concat("layer ", layer, " of sequence ", i, " at token ",
                                            truths_[i].tokens() - 1, " has relative error ", error,
                                            "; the limit is ", kTolerance));
        }
      }
    }
    return absl::OkStatus();
  }

  const Plan& plan_;
  client::Worker& worker_;
  const SyntheticShape shape_;
  std::vector<client::Sequence> sequences_;
  std::vector<SyntheticSequence> truths_;
  std::vector<std::uint16_t> key_, value_, query_;
  std::vector<std::vector<float>> outputs_;  // per layer
  std::vector<LayerTensors> tensors_;        // per layer
  std::size_t tensors_of_batch_ = 0;
};

std::string Render(const Plan& plan, const Outcome& outcome, bool mapped,
                   const std::string& device) {
  const auto count = [](std::uint64_t value) { return Concat(value); };
  Table table({{"worker " + plan.name, Align::kLeft}, {"", Align::kLeft}});
  table.Add({"transport", mapped ? "mapped memory; attention runs in this process" : "RPC"});
  table.Add({"device", device});
  table.Add({"prefilled", Concat(outcome.prefilled, " tokens in ", plan.sequences, " sequences")});
  table.Add({"decoded", Concat(outcome.decoded, " tokens, including a fork")});
  table.Add({"step", Concat("median ", Fixed(bench::Median(outcome.step_us), 0), " us, p99 ",
                            Fixed(bench::Percentile(outcome.step_us, 0.99), 0), " us")});
  table.Add({"retried steps", count(outcome.retries)});
  table.Add({"tiles of the fork", outcome.tile_bytes});
  char error[32];
  std::snprintf(error, sizeof error, "%.1e", outcome.worst_error);
  table.Add({"checked", Concat(outcome.checks, " outputs against double precision: worst error ",
                               error, ", limit ", Fixed(kTolerance, 2))});
  return table.Render();
}

}  // namespace

int RunWorker(std::span<const std::string_view> args) {
  return RunWorkerOn(client::GpuPlatform::System(), args);
}

int RunWorkerOn(const client::GpuPlatform& gpus, std::span<const std::string_view> args) {
  return RunCommand(WorkerSpec(), args, [&gpus](const Flags& flags) -> absl::Status {
    absl::StatusOr<Plan> plan = ReadPlan(flags);
    if (!plan.ok()) return plan.status();
    absl::StatusOr<std::unique_ptr<client::Worker>> worker =
        client::AttachWith({.address = plan->door.address,
                            .device = plan->door.device,
                            .tls = plan->door.tls,
                            .tenant_token = plan->door.token,
                            .worker_name = plan->name,
                            .map_memory = plan->mapped},
                           {.gpus = &gpus});
    if (!worker.ok()) return worker.status();
    Outcome outcome;
    absl::Status status = SyntheticWorker(*plan, **worker).Run(outcome);
    if (!status.ok()) return status;
    return Print(Render(*plan, outcome, (*worker)->mapped(), (*worker)->daemon().device));
  });
}

CommandSpec WorkerSpec() {
  return {
      .name = "worker",
      .summary = "run a synthetic worker that checks every result",
      .description =
          "Prefills, decodes and forks sequences of a synthetic model (4 layers, 8 query heads,\n"
          "2 kv heads, head_dim 128, bf16) and checks the attention outputs.\n",
      .examples = {"tessera worker --sequences=16 --steps=1000"},
      .flags = {{"name", "NAME", "Worker name in 'tessera status'.", "demo"},
                {"transport", "mapped|rpc", "Mapped memory, or RPC only.", "mapped"},
                {"sequences", "N", "Sequences in the batch.", "4"},
                {"prompt", "N", "Tokens to prefill per sequence.", "512"},
                {"steps", "N", "Tokens to decode per sequence.", "128"},
                {"check-every", "N", "Steps between checks.", "16"},
                {"seed", "N", "Seed of the synthetic model.", "1"}},
      .attaches = true};
}

}  // namespace tessera::cli
