// tessera bench compaction: memory that background compaction saves, and decode latency while it
// runs. Uses its own daemon.

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/bench.h"
#include "client/bench/workload/generated_prompt.h"
#include "client/bench/workload/synthetic.h"
#include "client/tools/admin.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

constexpr double kDenseBytes = 2.0 * 2 * kHeadDim;  // per entry

// The published operating point with the paper's settings, and the policy's own choice.
constexpr char kFixed[] =
    "bf16+mosaickv:keep=0.25,group=1,loss_k=1,loss_v=1,block=4|8|16,sinks=0,recent=0,floor=0";
constexpr char kChosen[] = "mosaickv";
// Short segments: each lane has several.
constexpr char kPieces[] =
    "bf16+mosaickv:keep=0.25,group=1,loss_k=1,loss_v=1,block=4|8|16,sinks=0,recent=0,floor=0,"
    "segment=4096";

// A prompt under a policy, and the suffix of its rows.
struct MemoryCase {
  const char* policy;
  std::uint64_t tokens;
  const char* suffix = "";
  double goal = 1;  // never larger than dense
};
constexpr MemoryCase kMemoryCases[] = {
    {kFixed, 1024},
    {kFixed, 4096},
    {kFixed, 16 * 1024},
    {kFixed, 64 * 1024, "", 2.99},
    {kChosen, 1024, "_chosen"},
    {kChosen, 4096, "_chosen"},
    {kChosen, 16 * 1024, "_chosen"},
    {kChosen, 64 * 1024, "_chosen"},
    {kPieces, 64 * 1024, "_pieces"},
};

// A daemon and a worker with a registered model.
struct Bench {
  std::unique_ptr<LocalDaemon> daemon;
  std::unique_ptr<client::Worker> worker;
  client::Model model;
};

absl::StatusOr<Bench> Open(const std::vector<std::string>& flags, std::uint32_t layers = 1) {
  Bench bench;
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start(flags);
  if (!daemon.ok()) return daemon.status();
  bench.daemon = *std::move(daemon);
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = bench.daemon->address(), .worker_name = "bench"});
  if (!worker.ok()) return worker.status();
  bench.worker = *std::move(worker);
  const client::LayerGeometry layer = {
      .query_heads = kKvHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim};
  absl::StatusOr<client::Model> model =
      bench.worker->RegisterModel({.name = Concat("layers: ", layers), .layers = {layers, layer}});
  if (!model.ok()) return model.status();
  bench.model = *std::move(model);
  return bench;
}

// Pool bytes of sequences: tiles, tables, rotations and snapshots.
struct Held {
  double bytes = 0;
  double waiting = 0;  // replaced, waiting for readers
  double raw = 0;      // raw copies in host memory
};

absl::StatusOr<Held> Look(Bench& bench) {
  const absl::StatusOr<v1::StatsResponse> stats = client::StatsMessage(*bench.worker);
  if (!stats.ok()) return stats.status();
  Held held;
  for (const v1::TenantStats& tenant : stats->tenants()) {
    for (const char* const tag : {"tiles", "tables", "rotations", "snapshots"}) {
      const auto it = tenant.used_bytes_by_tag().find(tag);
      if (it != tenant.used_bytes_by_tag().end()) held.bytes += static_cast<double>(it->second);
    }
    held.waiting += static_cast<double>(tenant.retired_bytes());
  }
  held.raw = static_cast<double>(stats->compaction().raw_copy_bytes());
  return held;
}

absl::StatusOr<Held> Settled(Bench& bench) {
  constexpr int kPatience = 1000;  // of 10 ms
  for (int i = 0; i < kPatience; ++i) {
    absl::StatusOr<Held> held = Look(bench);
    if (!held.ok() || held->waiting == 0) return held;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return absl::DeadlineExceededError("the daemon still holds replaced tiles after 10 s");
}

// Samples Held from a separate thread every 2 ms and keeps the maximum.
class PeakWatch {
 public:
  explicit PeakWatch(Bench& bench)
      : thread_([this, &bench] {
          while (!over_.load()) {
            const absl::StatusOr<Held> held = Look(bench);
            if (held.ok()) most_ = std::max(most_, held->bytes);
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
          }
        }) {}
  ~PeakWatch() { Stop(); }
  double Stop() {
    over_.store(true);
    if (thread_.joinable()) thread_.join();
    return most_;
  }

 private:
  std::atomic<bool> over_{false};
  double most_ = 0;
  std::thread thread_;
};

std::string TokensName(std::uint64_t tokens) { return Concat(tokens / 1024, "k"); }

// Decodes without pause, one token per step.
absl::Status Decode(Bench& bench, client::Sequence& sequence, const GeneratedPrompt& rows,
                    std::uint64_t tokens) {
  std::vector<float> output(kKvHeads * kHeadDim);
  std::vector<float> lse(kKvHeads);
  for (std::uint64_t i = 0; i < tokens; ++i) {
    client::Sequence* const batch[] = {&sequence};
    absl::StatusOr<client::Step> step = bench.worker->BeginStep(batch);
    if (!step.ok()) return step.status();
    const std::size_t at = i % rows.tokens * kKvHeads * kHeadDim;
    const auto key = std::as_bytes(std::span(rows.key).subspan(at, kKvHeads * kHeadDim));
    const auto value = std::as_bytes(std::span(rows.value).subspan(at, kKvHeads * kHeadDim));
    absl::Status status = step->AppendAndAttend(
        0,
        {.key = key, .value = value, .query = key, .output = WritableBytesOf(output), .lse = lse});
    if (status.ok()) status = step->End();
    if (!status.ok() && !absl::IsAborted(status)) return status;
  }
  return absl::OkStatus();
}

// Raw copies of tokens decoded after a prompt, which wait for their segment's strategy.
absl::Status MeasureRawCopies(Bench& bench, client::Sequence& sequence,
                              const GeneratedPrompt& prompt, const std::string& name,
                              Report& report) {
  constexpr std::uint64_t kDecoded = 256;
  if (absl::Status status = Decode(bench, sequence, prompt, kDecoded); !status.ok()) return status;
  // Wait until the last tiles have been absorbed.
  double raw = -1;
  for (int i = 0; i < 200; ++i) {
    const absl::StatusOr<Held> held = Look(bench);
    if (!held.ok()) return held.status();
    if (held->raw == raw) break;
    raw = held->raw;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  report.Add({.name = name,
              .value = raw / (static_cast<double>(kDecoded) * kKvHeads),
              .unit = "B",
              .baseline = "dense, 512 B",
              .ratio = raw / (kDenseBytes * kDecoded * kKvHeads),
              .sense = Goal::kAtMost});
  return absl::OkStatus();
}

absl::Status MeasureMemory(const GeneratedPrompt& prompt, const MemoryCase& memory,
                           Report& report) {
  const std::uint64_t tokens = memory.tokens;
  absl::StatusOr<Bench> bench = Open({});
  if (!bench.ok()) return bench.status();
  absl::StatusOr<client::Sequence> sequence =
      bench->worker->CreateSequence(bench->model, memory.policy);
  if (!sequence.ok()) return sequence.status();
  double peak = 0;
  {
    PeakWatch watch(*bench);
    absl::Status status = sequence->Append(prompt.Tensors(tokens)).status();
    if (status.ok()) status = sequence->Compress().status();
    if (!status.ok()) return status;
    peak = watch.Stop();
  }
  const absl::StatusOr<Held> held = Settled(*bench);
  if (!held.ok()) return held.status();
  const double entries = static_cast<double>(tokens) * kKvHeads;
  const std::string name = Concat("mosaickv_", TokensName(tokens), "_memory", memory.suffix);
  report.Add({.name = name,
              .value = held->bytes / entries,
              .unit = "B",
              .baseline = "dense, 512 B",
              .ratio = kDenseBytes * entries / held->bytes,
              .goal = memory.goal});
  report.Add({.name = name + "_peak",
              .value = peak / entries,
              .unit = "B",
              .baseline = "dense, 512 B",
              .ratio = kDenseBytes * entries / peak});
  return MeasureRawCopies(*bench, *sequence, prompt, name + "_raw_copies", report);
}

// Appends a prompt layer by layer, at most one layer ahead of the encoder, as if the worker
// computed a layer in the time the daemon encodes one.
absl::Status MeasureLayers(const GeneratedPrompt& prompt, Report& report) {
  constexpr std::uint32_t kLayers = 8;
  constexpr std::uint64_t kTokens = 16 * 1024;
  absl::StatusOr<Bench> bench = Open({}, kLayers);
  if (!bench.ok()) return bench.status();
  absl::StatusOr<client::Sequence> sequence = bench->worker->CreateSequence(bench->model, kFixed);
  if (!sequence.ok()) return sequence.status();
  const auto sealed = [&](std::uint64_t segments) -> absl::Status {
    for (int i = 0; i < 6000; ++i) {
      const absl::StatusOr<v1::StatsResponse> stats = client::StatsMessage(*bench->worker);
      if (!stats.ok()) return stats.status();
      if (stats->compaction().segments_sealed() >= segments) return absl::OkStatus();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return absl::DeadlineExceededError(
        Concat("fewer than ", segments, " segments were sealed within 30 s"));
  };
  PeakWatch watch(*bench);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    client::AppendTensors rows = prompt.Tensors(kTokens);
    rows.first_layer = layer;
    rows.layers = 1;
    rows.end_of_prompt = true;
    absl::Status status = sequence->Append(rows).status();
    if (status.ok() && layer > 0) status = sealed(std::uint64_t{layer} * kKvHeads);
    if (!status.ok()) return status;
  }
  if (absl::Status status = sealed(std::uint64_t{kLayers} * kKvHeads); !status.ok()) return status;
  const double peak = watch.Stop();
  const double entries = static_cast<double>(kTokens) * kKvHeads * kLayers;
  report.Add({.name = Concat("mosaickv_", TokensName(kTokens), "_", kLayers, "_layers_peak"),
              .value = peak / entries,
              .unit = "B",
              .baseline = "dense, 512 B",
              .ratio = kDenseBytes * entries / peak});
  return absl::OkStatus();
}

// ---- decode latency during compaction

// The CPUs that this process may use.
std::vector<int> OwnCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// Pins this thread and the threads it starts later.
absl::Status PinTo(std::span<const int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  if (::sched_setaffinity(0, sizeof set, &set) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "cannot pin a thread to a core");
}

// State shared by the threads that keep the compactor busy.
struct Asked {
  std::mutex forking;
  // Rounds started. Each uses a distinct but equivalent policy: under the same policy, forks of the
  // same rows would share one compression.
  std::atomic<int> begun{0};
  std::string NextPolicy() { return Concat(kFixed, ",window=", 512 + begun.fetch_add(1)); }
};

// Compresses forks of one dense sequence until Stop, to keep the compactor busy.
class Saturation {
 public:
  // Runs on `cpus`.
  Saturation(Bench& bench, client::Sequence& master, Asked& asked, std::span<const int> cpus)
      : thread_([this, &bench, &master, &asked, cpus] {
          absl::StatusOr<Admin> admin =
              Admin::At({.address = bench.daemon->address(), .tls = std::nullopt});
          status_ = admin.status();
          if (status_.ok()) status_ = PinTo(cpus);
          while (!over_.load() && status_.ok()) {
            absl::StatusOr<client::Sequence> fork = [&] {
              const std::lock_guard lock(asked.forking);
              return master.Fork();
            }();
            status_ = fork.status();
            if (status_.ok()) {
              status_ = admin->SetPolicy(fork->id().value(), asked.NextPolicy()).status();
            }
            if (status_.ok()) status_ = admin->Compress(fork->id().value()).status();
            if (status_.ok()) rounds_.fetch_add(1);
          }
          over_.store(true);
        }) {}
  ~Saturation() { Stop().IgnoreError(); }
  absl::Status Stop() {
    over_.store(true);
    if (thread_.joinable()) thread_.join();
    return status_;
  }
  int rounds() const { return rounds_.load(); }
  bool over() const { return over_.load(); }

 private:
  std::atomic<bool> over_{false};
  std::atomic<int> rounds_{0};
  absl::Status status_;
  std::thread thread_;
};

absl::Status TimeAttends(Bench& bench, client::Sequence& sequence, int count,
                         std::vector<double>& microseconds) {
  std::vector<std::uint16_t> query(kKvHeads * kHeadDim, 0x3c00);
  std::vector<float> output(query.size());
  std::vector<float> lse(kKvHeads);
  for (int i = 0; i < count; ++i) {
    client::Sequence* const batch[] = {&sequence};
    absl::StatusOr<client::Step> step = bench.worker->BeginStep(batch);
    if (!step.ok()) return step.status();
    const auto begun = std::chrono::steady_clock::now();
    absl::Status status =
        step->Attend(0, {.query = BytesOf(query), .output = WritableBytesOf(output), .lse = lse});
    if (!status.ok()) return status;
    microseconds.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begun)
            .count());
  }
  return absl::OkStatus();
}

struct Latency {
  std::vector<double> idle;
  std::vector<double> busy;
  int compressed = 0;
};

// Idle and busy turns alternate, so that both see the same load of the machine. The worker has one
// core, the daemon another; the requesting threads do not run on the worker's core.
absl::StatusOr<Latency> MeasureLatency(const GeneratedPrompt& prompt, const Options& options,
                                       std::span<const int> cpus) {
  // The daemon inherits the affinity of the thread that starts it.
  if (absl::Status status = PinTo(cpus.subspan(1)); !status.ok()) return status;
  absl::StatusOr<Bench> bench =
      Open({"--compactor-threads=1", Concat("--compactor-cpus=", cpus[1])});
  if (absl::Status status = PinTo(cpus); !status.ok()) return status;
  if (!bench.ok()) return bench.status();
  absl::StatusOr<client::Sequence> reader = bench->worker->CreateSequence(bench->model);
  if (!reader.ok()) return reader.status();
  absl::StatusOr<client::Sequence> master = bench->worker->CreateSequence(bench->model);
  if (!master.ok()) return master.status();
  absl::Status status = reader->Append(prompt.Tensors(4096)).status();
  if (status.ok()) status = master->Append(prompt.Tensors(16 * 1024)).status();
  if (!status.ok()) return status;
  Latency latency;
  absl::Status measured;
  Asked asked;
  std::thread worker([&] {
    measured = PinTo(cpus.first(1));
    if (!measured.ok()) return;
    const int attends = options.quick ? 300 : 1000;
    std::vector<double> warm_up;
    measured = TimeAttends(*bench, *reader, attends / 10, warm_up);
    for (int turn = 0; turn < 4 && measured.ok(); ++turn) {
      measured = TimeAttends(*bench, *reader, attends, latency.idle);
      if (!measured.ok()) return;
      // Two, so that the compactor never waits for a request.
      Saturation saturation(*bench, *master, asked, cpus.subspan(1));
      Saturation another(*bench, *master, asked, cpus.subspan(1));
      // Wait until the compactor is busy, so that every turn overlaps a compression.
      while (saturation.rounds() == 0 && !saturation.over() && measured.ok()) {
        measured = TimeAttends(*bench, *reader, 10, warm_up);
      }
      if (measured.ok()) measured = TimeAttends(*bench, *reader, attends, latency.busy);
      for (Saturation* each : {&saturation, &another}) {
        latency.compressed += each->rounds();
        const absl::Status stopped = each->Stop();
        if (measured.ok()) measured = stopped;
      }
    }
  });
  worker.join();
  if (!measured.ok()) return measured;
  const absl::StatusOr<v1::StatsResponse> stats = client::StatsMessage(*bench->worker);
  if (!stats.ok()) return stats.status();
  const std::uint64_t sealed = stats->compaction().segments_sealed();
  const auto wanted = static_cast<std::uint64_t>(latency.compressed) * kKvHeads;
  if (sealed < wanted) {
    return absl::InternalError(Concat(latency.compressed, " sequences were compressed, but only ",
                                      sealed, " segments were sealed; expected ", wanted));
  }
  return latency;
}

absl::Status AddLatency(const GeneratedPrompt& prompt, const Options& options, Report& report) {
  const std::vector<int> cpus = OwnCpus();
  if (cpus.size() < 2) {
    report.notes.push_back(
        Concat("decode_* skipped: it needs two cores, available: ", cpus.size()));
    return absl::OkStatus();
  }
  const absl::StatusOr<Latency> latency = MeasureLatency(prompt, options, cpus);
  if (!latency.ok()) return latency.status();
  struct Figure {
    const char* name;
    double share;
    double goal;
  };
  for (const Figure& figure : {Figure{"p50", 0.5, 1.15}, Figure{"p99", 0.99, 1.5}}) {
    const double idle = Percentile(latency->idle, figure.share);
    const double busy = Percentile(latency->busy, figure.share);
    const std::string baseline = Concat("decode_", figure.name, "_idle");
    report.Add({.name = baseline, .value = idle, .unit = "us"});
    report.Add({.name = Concat("decode_", figure.name, "_during_compaction"),
                .value = busy,
                .unit = "us",
                .baseline = baseline,
                .ratio = busy / idle,
                .goal = figure.goal,
                .sense = Goal::kAtMost});
  }
  report.notes.push_back(Concat(
      "decode_*: direct attends over 4096 dense tokens of one layer, the worker on one core, the "
      "daemon with one compactor thread on another. Samples: ",
      latency->idle.size(), " idle, ", latency->busy.size(), " while ", latency->compressed,
      " sequences of 16384 tokens were compressed"));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Report> RunCompaction(const Options& options) {
  Report report{.name = "compaction"};
  Progress("generating rows");
  const GeneratedPrompt prompt = MakePrompt(64 * 1024, options.seed);
  Progress("decode latency during compaction");
  if (absl::Status status = AddLatency(prompt, options, report); !status.ok()) return status;
  for (const MemoryCase& memory : kMemoryCases) {
    Progress(Concat("memory of ", TokensName(memory.tokens), " tokens under ", memory.policy));
    absl::Status status = MeasureMemory(prompt, memory, report);
    if (!status.ok()) return status;
  }
  Progress("memory while appending layer by layer");
  if (absl::Status status = MeasureLayers(prompt, report); !status.ok()) return status;
  report.notes.push_back(
      Concat("memory: bytes per token and kv head in the daemon's accounts (tiles, tables, "
             "rotations, snapshots), one layer of ",
             kKvHeads, " kv heads, head_dim ", kHeadDim, ", bf16, under \"", kFixed,
             "\"; _chosen under \"", kChosen, "\", _pieces under \"", kPieces,
             "\". _peak: maximum, sampled every 2 ms, from the first append to the end of "
             "Compress"));
  report.notes.push_back(Concat(
      "_raw_copies: host memory of raw rows and moments for 256 tokens decoded after the prompt, "
      "per token and kv head, with ",
      kKvHeads,
      " kv heads; moments take 256 KiB per lane at any length. _layers_peak: appended layer by "
      "layer, at most one layer ahead of the encoder"));
  return report;
}

}  // namespace tessera::cli::bench
