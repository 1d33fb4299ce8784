// tessera bench sharing: memory and time that workers save by forking one published prefix, and
// the latency of Match among many prefixes.

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/bench.h"
#include "client/bench/prefix_match.h"
#include "client/bench/workload/generated_prompt.h"
#include "client/bench/workload/sharing_worker.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kWorkers = 8;
constexpr double kMib = 1 << 20;

double MsSince(Clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

// A daemon and a worker with a timeout long enough for large compressions.
struct Bench {
  std::unique_ptr<LocalDaemon> daemon;
  std::unique_ptr<client::Worker> worker;
  client::Model model;
};

// The compactor reserves one thread for tails.
std::uint32_t CompactorThreads() { return std::thread::hardware_concurrency() + 1; }

// `head_gib`: the most dense rows held at any time.
absl::StatusOr<Bench> Open(std::uint32_t layers, std::uint64_t head_gib) {
  Bench bench;
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start(
      {Concat("--pool-bytes=", head_gib + 2, "GiB"),
       Concat("--compactor-threads=", CompactorThreads()), "--raw-copy-bytes=1GiB"});
  if (!daemon.ok()) return daemon.status();
  bench.daemon = *std::move(daemon);
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = bench.daemon->address(),
                              .worker_name = "bench",
                              .rpc_timeout = std::chrono::minutes(30)});
  if (!worker.ok()) return worker.status();
  bench.worker = *std::move(worker);
  absl::StatusOr<client::Model> model = bench.worker->RegisterModel(GeometryOf(layers));
  if (!model.ok()) return model.status();
  bench.model = *std::move(model);
  return bench;
}

// Pool bytes of sequences and prefixes, from the daemon's accounts.
struct Held {
  double kv = 0;     // tiles, tables, rotations, snapshots, sequences and the prefix index
  double tails = 0;  // tail rings of decoding sequences
};

absl::StatusOr<Held> Settled(client::Worker& worker) {
  constexpr int kPatience = 1000;  // of 10 ms
  for (int i = 0; i < kPatience; ++i) {
    const absl::StatusOr<v1::StatsResponse> stats = client::StatsMessage(worker);
    if (!stats.ok()) return stats.status();
    const v1::TenantStats& tenant = stats->tenants(0);
    if (tenant.retired_bytes() == 0) {
      const auto used = [&](const char* tag) {
        const auto it = tenant.used_bytes_by_tag().find(tag);
        return it == tenant.used_bytes_by_tag().end() ? 0 : static_cast<double>(it->second);
      };
      Held held = {.tails = used("tails")};
      for (const char* tag :
           {"tiles", "tables", "rotations", "snapshots", "sequences", "prefix_index"}) {
        held.kv += used(tag);
      }
      return held;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return absl::DeadlineExceededError("the daemon still holds replaced tiles after 10 s");
}

std::uint64_t DenseBytes(const SharedPrefix& head) {
  return std::uint64_t{head.layers} * head.tokens * kKvHeads * kHeadDim * 2 * 2;
}

absl::Status Append(client::Sequence& sequence, const GeneratedPrompt& prompt,
                    std::uint32_t layer) {
  client::AppendTensors tensors = prompt.Tensors(prompt.tokens);
  tensors.first_layer = layer;
  tensors.layers = 1;
  return sequence.Append(tensors).status();
}

// ---- private copies

// One layer: one dense copy per worker, all held at the same time.
absl::StatusOr<double> MeasurePrivate(const GeneratedPrompt& prompt) {
  const SharedPrefix layer = {.layers = 1, .tokens = static_cast<std::uint32_t>(prompt.tokens)};
  absl::StatusOr<Bench> bench = Open(1, 1 + (kWorkers * DenseBytes(layer) >> 30));
  if (!bench.ok()) return bench.status();
  std::vector<client::Sequence> copies;
  for (std::uint32_t i = 0; i < kWorkers; ++i) {
    Progress(Concat("dense copy ", i + 1, " of ", kWorkers, ", one layer"));
    absl::StatusOr<client::Sequence> copy = bench->worker->CreateSequence(bench->model);
    if (!copy.ok()) return copy.status();
    if (absl::Status status = Append(*copy, prompt, 0); !status.ok()) return status;
    copies.push_back(*std::move(copy));
  }
  const absl::StatusOr<Held> held = Settled(*bench->worker);
  if (!held.ok()) return held.status();
  return held->kv;
}

// ---- one copy for all

struct Shared {
  Held of_one;
  Held of_all;
  double append_ms = 0;
  double compress_ms = 0;
  FirstToken token;  // of the worker that computed it
  double publish_ms = 0;
  std::vector<JoinTimes> joins;  // of the others

  double Computed() const { return append_ms + compress_ms + token.open_ms + token.attend_ms; }
};

// As a worker without sharing would: layer by layer, so that only one layer is dense at a time.
absl::Status Compute(const GeneratedPrompt& prompt, std::uint32_t layers,
                     client::Sequence& sequence, Shared& shared) {
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    Progress(Concat("layer ", layer + 1, " of ", layers, " under ", kSharedPolicy));
    Clock::time_point begun = Clock::now();
    absl::Status status = Append(sequence, prompt, layer);
    shared.append_ms += MsSince(begun);
    begun = Clock::now();
    if (status.ok()) status = sequence.Compress().status();
    shared.compress_ms += MsSince(begun);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<Shared> MeasureShared(const GeneratedPrompt& prompt, const SharedPrefix& head) {
  absl::StatusOr<Bench> bench = Open(head.layers, 1 + (DenseBytes(head) >> 30));
  if (!bench.ok()) return bench.status();
  client::Worker& worker = *bench->worker;
  Shared shared;
  absl::StatusOr<client::Sequence> sequence = worker.CreateSequence(bench->model, kSharedPolicy);
  if (!sequence.ok()) return sequence.status();
  absl::Status status = Compute(prompt, head.layers, *sequence, shared);
  if (!status.ok()) return status;
  Progress("publishing");
  const Clock::time_point begun = Clock::now();
  if (status = sequence->Publish(TokenIds(head.tokens, 0)).status(); !status.ok()) return status;
  shared.publish_ms = MsSince(begun);
  // After publication and before the first token the sequence and the prefix share everything.
  absl::StatusOr<Held> held = Settled(worker);
  if (!held.ok()) return held.status();
  shared.of_one = *held;
  const absl::StatusOr<FirstToken> token = Decode(worker, *sequence, head.layers);
  if (!token.ok()) return token.status();
  shared.token = *token;

  std::vector<std::unique_ptr<SharingWorker>> others;
  for (std::uint32_t i = 1; i < kWorkers; ++i) {
    Progress(Concat("worker ", i + 1, " of ", kWorkers));
    absl::StatusOr<std::unique_ptr<SharingWorker>> other =
        SharingWorker::Start(bench->daemon->address(), head);
    if (!other.ok()) return other.status();
    const absl::StatusOr<JoinTimes> times = (*other)->Join();
    if (!times.ok()) return times.status();
    if (times->token.lse != token->lse) {
      return absl::InternalError(Concat("worker ", i + 1, " computed lse ", times->token.lse,
                                        ", the first worker ", token->lse));
    }
    shared.joins.push_back(*times);
    others.push_back(*std::move(other));
  }
  if (held = Settled(worker); !held.ok()) return held.status();
  shared.of_all = *held;
  return shared;
}

// ---- rows

void AddMemory(const SharedPrefix& head, double private_layer, const Shared& shared,
               Report& report) {
  const double dense = private_layer * head.layers;
  const double compressed = shared.of_one.kv * kWorkers;
  report.Add({.name = "private_dense_one_layer", .value = private_layer / kMib, .unit = "MiB"});
  report.Add({.name = "private_dense_arithmetic", .value = dense / kMib, .unit = "MiB"});
  report.Add({.name = "shared_by_1", .value = shared.of_one.kv / kMib, .unit = "MiB"});
  report.Add({.name = "private_packed_arithmetic", .value = compressed / kMib, .unit = "MiB"});
  for (const char* const baseline : {"private_dense_arithmetic", "private_packed_arithmetic"}) {
    const bool first = baseline[8] == 'd';
    report.Add({.name = Concat("shared_by_", kWorkers, first ? "" : "_against_packed"),
                .value = shared.of_all.kv / kMib,
                .unit = "MiB",
                .baseline = baseline,
                .ratio = (first ? dense : compressed) / shared.of_all.kv});
  }
  report.Add(
      {.name = Concat("tails_of_", kWorkers), .value = shared.of_all.tails / kMib, .unit = "MiB"});
  report.notes.push_back(
      Concat("memory: from the daemon's accounts (tiles, tables, rotations, snapshots, sequences, "
             "prefix index), for a prefix of ",
             head.tokens, " tokens, ", head.layers, " layers x ", kKvHeads, " kv heads, head_dim ",
             kHeadDim, ", bf16"));
  report.notes.push_back(Concat("private_dense_one_layer: ", kWorkers,
                                " dense copies of one layer, held at the same time. "
                                "private_dense_arithmetic: that times ",
                                head.layers,
                                " layers, not measured (lanes are independent). "
                                "private_packed_arithmetic: ",
                                kWorkers, " times shared_by_1, not measured"));
  report.notes.push_back(
      Concat("shared_by_", kWorkers, ": measured, one worker that published the prefix under ",
             kSharedPolicy, " and ", kWorkers - 1,
             " processes that forked it and decoded one token each. tails: their tail rings, which "
             "private copies would need, too"));
}

void AddTimes(const Shared& shared, Report& report) {
  const auto part = [&](const char* name, auto&& of) {
    std::vector<double> values;
    for (const JoinTimes& join : shared.joins) values.push_back(of(join));
    report.Add({.name = Concat("join_", name), .value = Median(values), .unit = "ms"});
  };
  report.Add({.name = "compute_append", .value = shared.append_ms, .unit = "ms"});
  report.Add({.name = "compute_compress", .value = shared.compress_ms, .unit = "ms"});
  report.Add({.name = "compute_first_attend", .value = shared.Computed(), .unit = "ms"});
  report.Add({.name = "publish", .value = shared.publish_ms, .unit = "ms"});
  part("match", [](const JoinTimes& join) { return join.match_ms; });
  part("fork", [](const JoinTimes& join) { return join.fork_ms; });
  part("open", [](const JoinTimes& join) { return join.token.open_ms; });
  part("attend", [](const JoinTimes& join) { return join.token.attend_ms; });
  part("other_layers", [](const JoinTimes& join) { return join.token.rest_ms; });
  std::vector<double> until;
  for (const JoinTimes& join : shared.joins) until.push_back(join.UntilFirstAttend());
  const double slowest = *std::max_element(until.begin(), until.end());
  for (const auto& [name, value] :
       {std::pair{"join_first_attend", Median(until)}, std::pair{"join_slowest", slowest}}) {
    report.Add({.name = name,
                .value = value,
                .unit = "ms",
                .baseline = "compute_first_attend",
                .ratio = shared.Computed() / value});
  }
  report.notes.push_back(
      Concat("compute: the daemon's work for a worker without sharing: append and compress the "
             "prefix layer by layer, then the first attention. The model's own prefill is not "
             "included. Measured once, with ",
             CompactorThreads() - 1, " compactor threads"));
  report.notes.push_back(
      Concat("join: medians of workers 2 to ", kWorkers,
             ", one after another, already attached. first_attend: match, fork, open (tail rings "
             "are created, the pool is mapped) and attention of the first layer with the page "
             "faults of the mapping. slowest: the slowest of these workers"));
}

}  // namespace

absl::StatusOr<Report> RunSharing(const Options& options) {
  Report report{.name = "sharing"};
  const SharedPrefix head = {.layers = options.layers.value_or(options.quick ? 2 : 32),
                             .tokens = options.tokens.value_or(options.quick ? 4096 : 64 * 1024)};
  Progress("generating rows");
  const GeneratedPrompt prompt = MakePrompt(head.tokens, options.seed);
  const absl::StatusOr<double> private_layer = MeasurePrivate(prompt);
  if (!private_layer.ok()) return private_layer.status();
  const absl::StatusOr<Shared> shared = MeasureShared(prompt, head);
  if (!shared.ok()) return shared.status();
  AddMemory(head, *private_layer, *shared, report);
  AddTimes(*shared, report);
  if (absl::Status status = MeasureMatch(options.quick, report); !status.ok()) return status;
  return report;
}

}  // namespace tessera::cli::bench
