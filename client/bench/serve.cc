// tessera bench serve: the recall model decodes batches through a daemon, compared with the same
// model and a dense cache in the worker's memory.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/bench/bench.h"
#include "client/bench/workload/local_cache.h"
#include "client/eval/tasks/recall_tasks.h"
#include "client/model/generate.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

// Steps of one batch before the next batch has its turn: about a scheduler's time slice. One more,
// uncounted step comes first, since the CPU caches hold the previous batch's data.
constexpr std::uint32_t kSliceSteps = 4;
constexpr std::uint32_t kStepsOfTurn = kSliceSteps + 1;
constexpr std::uint32_t kMostTokens = 2048;  // per prompt
// Batches of each side, opened alternately: the memory pages a batch gets change its speed by
// several percent for its lifetime.
constexpr std::uint32_t kPairs = 4;

// A comparison of batches with a local cache and batches in a daemon. Contests run one after
// another, so that a daemon's background work for one policy does not affect another.
struct Contest {
  std::string name;
  std::string policy;
  std::uint32_t sequences = 1;
};

std::vector<Contest> ContestsOf(std::uint32_t k) {
  const auto of = [&](const char* name) { return Concat(name, "_k", k); };
  std::vector<Contest> contests;
  if (k != 1) contests = {{"daemon_cost_dense_k1", "dense", 1}};
  contests.insert(
      contests.end(),
      {{of("daemon_cost_dense"), "dense", k},
       {of("mosaickv"), "mosaickv:keep=0.25,group=1,loss_k=1,loss_v=1", k},
       {of("chunkkv+mosaickv"),
        "chunkkv:budget=0.35+mosaickv:keep=0.25,group=1,select=0,loss_k=1,loss_v=1", k}});
  return contests;
}

// Rows of every layer of a prompt, computed once.
struct PromptRows final : llm::Attention {
  explicit PromptRows(const llm::Config& c) : config(c) {}
  absl::Status Attend(const llm::LayerRows& rows, std::span<float> output) override {
    llm::AttendDense(config, rows, output);
    keys.emplace_back(rows.key.begin(), rows.key.end());
    values.emplace_back(rows.value.begin(), rows.value.end());
    queries.emplace_back(rows.query.begin(), rows.query.end());
    return absl::OkStatus();
  }
  llm::Config config;
  std::vector<std::vector<std::uint16_t>> keys, values, queries;
};

struct Shared {
  std::unique_ptr<llm::Model> model;
  std::vector<llm::TokenId> prompt;
  std::unique_ptr<PromptRows> rows;
  std::string address;
};

absl::StatusOr<Shared> Prepare(std::uint32_t tokens, std::uint32_t seed) {
  Shared shared;
  const std::string folder = RecallFolder();
  absl::StatusOr<std::unique_ptr<llm::Model>> model = llm::Model::Load(folder);
  if (!model.ok()) return model.status();
  shared.model = *std::move(model);
  const absl::StatusOr<llm::Vocab> vocab = llm::Vocab::Read(folder + "/vocab.json");
  if (!vocab.ok()) return vocab.status();
  const absl::StatusOr<eval::RecallTasks> tasks = eval::RecallTasks::Create(*vocab);
  if (!tasks.ok()) return tasks.status();
  absl::StatusOr<eval::RecallSample> sample =
      tasks->Sample({.task = "niah_multikey", .length = tokens, .seed = seed});
  if (!sample.ok()) return sample.status();
  shared.prompt = std::move(sample->prompt);
  shared.rows = std::make_unique<PromptRows>(shared.model->config());
  std::vector<std::uint32_t> positions(shared.prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  const absl::Status status =
      shared.model->Forward({.tokens = shared.prompt, .positions = positions}, *shared.rows)
          .status();
  if (!status.ok()) return status;
  return shared;
}

// One batch of one worker, with a local cache or in the daemon.
class Batch {
 public:
  // A local cache with room for `steps` steps.
  static std::unique_ptr<Batch> OpenOwn(const Shared& shared, client::Worker& worker,
                                        std::uint32_t sequences, std::uint32_t steps) {
    std::unique_ptr<Batch> batch(new Batch(shared, worker, sequences));
    batch->own_ =
        std::make_unique<LocalCache>(shared.model->config(), sequences,
                                     static_cast<std::uint32_t>(shared.prompt.size()) + steps);
    batch->own_->Fill(shared.rows->keys, shared.rows->values);
    return batch;
  }

  static absl::StatusOr<std::unique_ptr<Batch>> Open(const Shared& shared, client::Worker& worker,
                                                     const client::Model& model,
                                                     const Contest& contest) {
    std::unique_ptr<Batch> batch(new Batch(shared, worker, contest.sequences));
    for (std::uint32_t i = 0; i < contest.sequences; ++i) {
      absl::StatusOr<client::Sequence> sequence = worker.CreateSequence(model, contest.policy);
      if (!sequence.ok()) return sequence.status();
      batch->sequences_.push_back(*std::move(sequence));
      const absl::Status status = batch->Fill(batch->sequences_.back());
      if (!status.ok()) return status;
    }
    return batch;
  }

  absl::Status Step() {
    absl::StatusOr<std::vector<float>> logits = own_ != nullptr ? OwnStep() : DaemonStep();
    if (!logits.ok()) return logits.status();
    const std::size_t vocabulary = shared_.model->config().vocabulary;
    for (std::size_t i = 0; i < next_.size(); ++i) {
      next_[i] = llm::Sampler({}).Choose(std::span(*logits).subspan(i * vocabulary, vocabulary));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::uint64_t> PoolBytes() const {
    std::uint64_t bytes = 0;
    for (const client::Sequence& sequence : sequences_) {
      const absl::StatusOr<client::SequenceDescription> told = sequence.Describe();
      if (!told.ok()) return told.status();
      bytes += told->tile_bytes + told->rotation_bytes + told->table_bytes;
    }
    return bytes;
  }

 private:
  Batch(const Shared& shared, client::Worker& worker, std::uint32_t sequences)
      : shared_(shared), worker_(worker), next_(sequences, shared.prompt.back()) {}

  absl::Status Fill(client::Sequence& sequence) {
    const PromptRows& rows = *shared_.rows;
    const std::uint64_t tokens = shared_.prompt.size();
    absl::Status status = sequence.ObserveTokens(0, shared_.prompt);
    for (std::uint32_t layer = 0; status.ok() && layer < rows.config.layers; ++layer) {
      const auto key = std::as_bytes(std::span(rows.keys[layer]));
      const auto query = std::as_bytes(std::span(rows.queries[layer]));
      status =
          sequence.Observe({.layer = layer, .query = query, .key = key, .prompt_tokens = tokens});
      if (!status.ok()) break;
      status = sequence
                   .Append({.key = key,
                            .value = std::as_bytes(std::span(rows.values[layer])),
                            .tokens = tokens,
                            .first_layer = layer,
                            .layers = 1})
                   .status();
    }
    return status.ok() ? sequence.Compress().status() : status;
  }

  absl::StatusOr<std::vector<float>> OwnStep() {
    const std::vector<std::uint32_t> positions(next_.size(), own_->tokens());
    std::vector<std::uint32_t> all(next_.size());
    std::iota(all.begin(), all.end(), 0);
    return shared_.model->Forward({.tokens = next_, .positions = positions, .logits_of = all},
                                  *own_);
  }

  absl::StatusOr<std::vector<float>> DaemonStep() {
    std::vector<llm::Turn> turns;
    for (std::size_t i = 0; i < next_.size(); ++i) {
      turns.push_back({.sequence = &sequences_[i], .tokens = std::span(next_).subspan(i, 1)});
    }
    return llm::Advance(*shared_.model, worker_, turns);
  }

  const Shared& shared_;
  client::Worker& worker_;
  std::vector<client::Sequence> sequences_;
  std::unique_ptr<LocalCache> own_;
  std::vector<llm::TokenId> next_;
};

// Figures of one side's batches, over all workers.
struct Measured {
  std::vector<double> step_ms;
  std::vector<double> slice_seconds;  // all workers start and end a slice together
  std::vector<double> round_seconds;  // sum of the round's slices
  double daemon_seconds = 0;
  std::uint64_t pool_bytes = 0;
};

struct Outcome {
  Measured own;
  Measured daemon;
};

// The worker threads, synchronised by barriers: all run the same slice of the same batch.
class Race {
 public:
  Race(const Shared& shared, const LocalDaemon& daemon, const Contest& contest,
       const Options& options)
      : shared_(shared),
        daemon_(daemon),
        contest_(contest),
        workers_(options.workers),
        rounds_(options.quick ? 4 : 16),
        seed_(options.seed),
        barrier_(options.workers) {}

  absl::StatusOr<Outcome> Run() {
    std::vector<std::thread> others;
    for (std::uint32_t i = 1; i < workers_; ++i) others.emplace_back([this] { Work(false); });
    Work(true);
    for (std::thread& other : others) other.join();
    if (!status_.ok()) return status_;
    return outcome_;
  }

 private:
  struct Entrant {
    std::unique_ptr<Batch> batch;
    Measured* measured;  // its side's figures
  };
  // State of one worker.
  struct Mine {
    std::unique_ptr<client::Worker> worker;
    std::vector<Entrant> entrants;
  };

  absl::Status Open(Mine& mine) {
    absl::StatusOr<std::unique_ptr<client::Worker>> worker =
        client::Worker::Attach({.address = shared_.address, .worker_name = "bench"});
    if (!worker.ok()) return worker.status();
    mine.worker = *std::move(worker);
    const absl::StatusOr<client::Model> model =
        mine.worker->RegisterModel(llm::GeometryOf(shared_.model->config(), "recall"));
    if (!model.ok()) return model.status();
    for (std::uint32_t i = 0; i < 2 * kPairs; ++i) {
      // Order: own, daemon, daemon, own, ... since the first pages are slower.
      if ((i + 1) / 2 % 2 == 0) {
        mine.entrants.push_back({Batch::OpenOwn(shared_, *mine.worker, contest_.sequences,
                                                (rounds_ + 1) * kStepsOfTurn),
                                 &outcome_.own});
        continue;
      }
      absl::StatusOr<std::unique_ptr<Batch>> batch =
          Batch::Open(shared_, *mine.worker, *model, contest_);
      if (!batch.ok()) return batch.status();
      mine.entrants.push_back({*std::move(batch), &outcome_.daemon});
    }
    return absl::OkStatus();
  }

  // A worker that fails still arrives at every barrier, so that no other worker hangs.
  void Work(bool first) {
    Mine mine;
    Note(Open(mine));
    std::mt19937_64 random(seed_);  // the same order in all workers
    std::vector<std::size_t> order(2 * kPairs);
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::uint32_t round = 0; round <= rounds_; ++round) {
      if (first && round > 0) {
        outcome_.own.round_seconds.push_back(0);
        outcome_.daemon.round_seconds.push_back(0);
      }
      // Random order, so that no batch always follows the same one.
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t entrant : order) Slice(mine, entrant, first, round > 0);
    }
    for (const Entrant& entrant : mine.entrants) {
      const absl::StatusOr<std::uint64_t> bytes = entrant.batch->PoolBytes();
      Note(bytes.status());
      const std::lock_guard<std::mutex> lock(mutex_);
      if (bytes.ok()) entrant.measured->pool_bytes += *bytes / kPairs;
    }
  }

  void Slice(Mine& mine, std::size_t entrant, bool first, bool counts) {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point begun) {
      return std::chrono::duration<double>(Clock::now() - begun).count();
    };
    if (!failed_) Note(mine.entrants[entrant].batch->Step());
    barrier_.arrive_and_wait();
    const double daemon_before = first ? daemon_.CpuSeconds() : 0;
    const Clock::time_point begun = Clock::now();
    std::vector<double> step_ms;
    for (std::uint32_t i = 0; i < kSliceSteps && !failed_; ++i) {
      const Clock::time_point step = Clock::now();
      Note(mine.entrants[entrant].batch->Step());
      step_ms.push_back(since(step) * 1e3);
    }
    barrier_.arrive_and_wait();
    if (!counts || failed_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    Measured& measured = *mine.entrants[entrant].measured;
    measured.step_ms.insert(measured.step_ms.end(), step_ms.begin(), step_ms.end());
    if (!first) return;
    measured.slice_seconds.push_back(since(begun));
    measured.round_seconds.back() += measured.slice_seconds.back();
    measured.daemon_seconds += daemon_.CpuSeconds() - daemon_before;
  }

  void Note(const absl::Status& status) {
    if (status.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    status_.Update(status);
    failed_ = true;
  }

  const Shared& shared_;
  const LocalDaemon& daemon_;
  const Contest contest_;
  const std::uint32_t workers_;
  const std::uint32_t rounds_;
  const std::uint64_t seed_;
  std::barrier<> barrier_;
  std::mutex mutex_;  // guards status_ and outcome_
  absl::Status status_;
  Outcome outcome_;
  std::atomic<bool> failed_{false};
};

Row RowOf(const std::string& name, std::uint32_t sequences, const Measured& measured,
          std::uint32_t workers) {
  return {.name = name,
          .value = kSliceSteps * sequences * workers / Median(measured.slice_seconds),
          .unit = "tokens/s",
          .sense = Goal::kAtMost,
          .p50_ms = Median(measured.step_ms),
          .p99_ms = Percentile(measured.step_ms, 0.99)};
}

void AddRows(const Contest& contest, const Outcome& outcome, std::uint32_t workers,
             Report& report) {
  const bool dense = contest.policy == "dense";
  const std::string own = Concat("own_k", contest.sequences);
  if (dense) report.Add(RowOf(own, contest.sequences, outcome.own, workers));
  Row row = RowOf(contest.name, contest.sequences, outcome.daemon, workers);
  row.baseline = own;
  const std::vector<double>& slices = outcome.daemon.slice_seconds;
  row.daemon_cpu =
      100 * outcome.daemon.daemon_seconds / std::accumulate(slices.begin(), slices.end(), 0.0);
  row.pool_mib = static_cast<double>(outcome.daemon.pool_bytes) / (1 << 20);
  std::vector<double> ratios;
  for (std::size_t round = 0; round < outcome.own.round_seconds.size(); ++round) {
    ratios.push_back(outcome.daemon.round_seconds[round] / outcome.own.round_seconds[round]);
  }
  row.ratio = Median(ratios);
  row.paired = true;
  if (dense && contest.sequences >= 16) row.goal = 1.03;
  report.Add(row);
}

}  // namespace

absl::StatusOr<Report> RunServe(const Options& options) {
  const std::uint32_t tokens = options.tokens.value_or(1024);
  if (tokens > kMostTokens) {
    return absl::InvalidArgumentError(
        Concat("--tokens is ", tokens, "; the recall model's limit is ", kMostTokens, " tokens"));
  }
  Report report{.name = "serve"};
  Progress("computing the prompt");
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start({});
  if (!daemon.ok()) return daemon.status();
  absl::StatusOr<Shared> shared = Prepare(tokens, static_cast<std::uint32_t>(options.seed));
  if (!shared.ok()) return shared.status();
  shared->address = (*daemon)->address();
  for (const Contest& contest : ContestsOf(options.sequences)) {
    Progress(Concat(contest.name, ": ", kPairs, " batches on each side"));
    const absl::StatusOr<Outcome> outcome = Race(*shared, **daemon, contest, options).Run();
    if (!outcome.ok()) return outcome.status();
    AddRows(contest, *outcome, options.workers, report);
  }
  report.notes = {
      Concat(options.workers, " workers, each with batches of 1 and ", options.sequences,
             " sequences, from ", shared->prompt.size(), " tokens on; the recall model, ",
             "one thread per worker"),
      "own: a dense cache in the worker's memory, on huge pages if available, read by the same "
      "kernels",
      Concat("each row: ", kPairs, " batches in the daemon and ", kPairs,
             " in the worker's memory, opened alternately. A slice has ", kSliceSteps,
             " steps after one uncounted step; the order of slices is random in each round"),
      "ratio: time of a round's slices divided by the baseline's, median over rounds. p50, p99: of "
      "one step, which decodes one token of every sequence",
      "daemon CPU %: of one core, while its batches decoded"};
  return report;
}

}  // namespace tessera::cli::bench
