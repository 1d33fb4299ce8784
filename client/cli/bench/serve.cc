// tessera bench serve: a model that decodes in batches through a daemon, against the same model
// with a dense cache in its own memory.

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

#include "client/cli/bench/bench.h"
#include "client/cli/bench/local_daemon.h"
#include "client/cli/bench/own_tiles.h"
#include "client/cli/eval/recall_tasks.h"
#include "client/worker.h"
#include "client/worker/generate.h"
#include "daemon/base/strings.h"

namespace tessera::cli::bench {

namespace {

// Steps of one side before the next one has its turn: about as long as a scheduler's slice. One
// more comes before them and is not counted: caches hold what the side before has read.
constexpr std::uint32_t kSliceSteps = 4;
constexpr std::uint32_t kStepsOfTurn = kSliceSteps + 1;
constexpr std::uint32_t kMostTokens = 2048;  // of a prompt

// What is compared: a batch of so many sequences in each worker.
struct Side {
  std::string name;
  std::string policy;  // empty: a cache of the worker's own
  std::uint32_t sequences = 1;
  std::string baseline;
};

std::vector<Side> SidesOf(std::uint32_t k) {
  const auto of = [&](const char* name) { return Concat(name, "_k", k); };
  std::vector<Side> sides;
  if (k != 1) {
    sides = {{"own_k1", "", 1, ""}, {"daemon_cost_dense_k1", "dense", 1, "own_k1"}};
  }
  const std::string own = of("own");
  sides.insert(
      sides.end(),
      {{own, "", k, ""},
       {of("daemon_cost_dense"), "dense", k, own},
       {of("mosaickv"), "mosaickv:keep=0.25,group=1,loss_k=1,loss_v=1", k, own},
       {of("chunkkv+mosaickv"),
        "chunkkv:budget=0.35+mosaickv:keep=0.25,group=1,select=0,loss_k=1,loss_v=1", k, own}});
  return sides;
}

// A prompt, computed once: rows of every layer.
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

// A side's batch in one worker.
class Batch {
 public:
  static absl::StatusOr<std::unique_ptr<Batch>> Open(const Shared& shared, client::Worker& worker,
                                                     const client::Model& model, const Side& side,
                                                     std::uint32_t steps) {
    std::unique_ptr<Batch> batch(new Batch(shared, worker, side));
    if (side.policy.empty()) {
      batch->own_ =
          std::make_unique<OwnTiles>(shared.model->config(), side.sequences,
                                     static_cast<std::uint32_t>(shared.prompt.size()) + steps);
      batch->own_->Fill(shared.rows->keys, shared.rows->values);
      return batch;
    }
    for (std::uint32_t i = 0; i < side.sequences; ++i) {
      absl::StatusOr<client::Sequence> sequence = worker.CreateSequence(model, side.policy);
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
      const absl::StatusOr<v1::DescribeResponse> told = sequence.Describe();
      if (!told.ok()) return told.status();
      bytes += told->tile_bytes() + told->rotation_bytes() + told->table_bytes();
    }
    return bytes;
  }

 private:
  Batch(const Shared& shared, client::Worker& worker, const Side& side)
      : shared_(shared), worker_(worker), next_(side.sequences, shared.prompt.back()) {}

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
  std::unique_ptr<OwnTiles> own_;
  std::vector<llm::TokenId> next_;
};

// Of one side, over all workers.
struct Measured {
  std::vector<double> step_ms;
  std::vector<double> slice_seconds;  // by round: of all workers, begun and ended together
  double daemon_seconds = 0;
  std::uint64_t pool_bytes = 0;
};

// The threads of the workers, in step: all are in the same slice of the same side.
class Race {
 public:
  Race(const Shared& shared, const LocalDaemon& daemon, std::vector<Side> sides,
       const Options& options)
      : shared_(shared),
        daemon_(daemon),
        sides_(std::move(sides)),
        workers_(options.workers),
        rounds_(options.quick ? 12 : 40),
        seed_(options.seed),
        barrier_(options.workers),
        measured_(sides_.size()) {}

  absl::StatusOr<std::vector<Measured>> Run() {
    std::vector<std::thread> others;
    for (std::uint32_t i = 1; i < workers_; ++i) others.emplace_back([this] { Work(false); });
    Work(true);
    for (std::thread& other : others) other.join();
    if (!status_.ok()) return status_;
    return measured_;
  }

 private:
  struct Mine {
    std::unique_ptr<client::Worker> worker;
    client::Model model;
    std::vector<std::unique_ptr<Batch>> batches;  // by side
  };

  absl::Status Open(Mine& mine) {
    absl::StatusOr<std::unique_ptr<client::Worker>> worker =
        client::Worker::Attach({.address = shared_.address, .worker_name = "bench"});
    if (!worker.ok()) return worker.status();
    mine.worker = *std::move(worker);
    absl::StatusOr<client::Model> model =
        mine.worker->RegisterModel(llm::GeometryOf(shared_.model->config(), "recall"));
    if (!model.ok()) return model.status();
    mine.model = *std::move(model);
    for (const Side& side : sides_) {
      absl::StatusOr<std::unique_ptr<Batch>> batch =
          Batch::Open(shared_, *mine.worker, mine.model, side, (rounds_ + 1) * kStepsOfTurn);
      if (!batch.ok()) return batch.status();
      mine.batches.push_back(*std::move(batch));
    }
    return absl::OkStatus();
  }

  // Whoever fails goes on to every barrier, so that nobody waits in vain.
  void Work(bool first) {
    Mine mine;
    Note(Open(mine));
    if (first) Progress(Concat("decoding: ", rounds_, " rounds of ", sides_.size(), " batches"));
    std::mt19937_64 random(seed_);  // alike in all workers
    std::vector<std::size_t> order(sides_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::uint32_t round = 0; round <= rounds_; ++round) {
      // So that none always follows the same one.
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t side : order) Slice(mine, side, first, round > 0);
    }
    for (std::size_t side = 0; !failed_ && side < sides_.size(); ++side) {
      const absl::StatusOr<std::uint64_t> bytes = mine.batches[side]->PoolBytes();
      Note(bytes.status());
      const std::lock_guard<std::mutex> lock(mutex_);
      if (bytes.ok()) measured_[side].pool_bytes += *bytes;
    }
  }

  void Slice(Mine& mine, std::size_t side, bool first, bool counts) {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point begun) {
      return std::chrono::duration<double>(Clock::now() - begun).count();
    };
    if (!failed_) Note(mine.batches[side]->Step());
    barrier_.arrive_and_wait();
    const double daemon_before = first ? daemon_.CpuSeconds() : 0;
    const Clock::time_point begun = Clock::now();
    std::vector<double> step_ms;
    for (std::uint32_t i = 0; i < kSliceSteps && !failed_; ++i) {
      const Clock::time_point step = Clock::now();
      Note(mine.batches[side]->Step());
      step_ms.push_back(since(step) * 1e3);
    }
    barrier_.arrive_and_wait();
    if (!counts) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    Measured& measured = measured_[side];
    measured.step_ms.insert(measured.step_ms.end(), step_ms.begin(), step_ms.end());
    if (!first) return;
    measured.slice_seconds.push_back(since(begun));
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
  const std::vector<Side> sides_;
  const std::uint32_t workers_;
  const std::uint32_t rounds_;
  const std::uint64_t seed_;
  std::barrier<> barrier_;
  std::mutex mutex_;  // over what follows
  absl::Status status_;
  std::vector<Measured> measured_;
  std::atomic<bool> failed_{false};
};

Row RowOf(const Side& side, const Measured& measured, const Measured* own, std::uint32_t workers) {
  const double seconds =
      std::accumulate(measured.slice_seconds.begin(), measured.slice_seconds.end(), 0.0);
  Row row = {.name = side.name,
             .value = kSliceSteps * side.sequences * workers / Median(measured.slice_seconds),
             .unit = "tokens/s",
             .baseline = side.baseline,
             .sense = Goal::kAtMost,
             .p50_ms = Median(measured.step_ms),
             .p99_ms = Percentile(measured.step_ms, 0.99)};
  if (own == nullptr) return row;
  row.daemon_cpu = 100 * measured.daemon_seconds / seconds;
  row.pool_mib = static_cast<double>(measured.pool_bytes) / (1 << 20);
  std::vector<double> ratios;
  for (std::size_t round = 0; round < measured.slice_seconds.size(); ++round) {
    ratios.push_back(measured.slice_seconds[round] / own->slice_seconds[round]);
  }
  row.ratio = Median(ratios);
  if (side.policy == "dense" && side.sequences >= 16) row.goal = 1.03;
  return row;
}

}  // namespace

absl::StatusOr<Report> RunServe(const Options& options) {
  const std::uint32_t tokens = options.tokens.value_or(1024);
  if (tokens > kMostTokens) {
    return absl::InvalidArgumentError(
        Concat("--tokens is ", tokens, "; the recall model reads ", kMostTokens, " at most"));
  }
  Report report{.name = "serve"};
  Progress("a prompt");
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start({});
  if (!daemon.ok()) return daemon.status();
  absl::StatusOr<Shared> shared = Prepare(tokens, static_cast<std::uint32_t>(options.seed));
  if (!shared.ok()) return shared.status();
  shared->address = (*daemon)->address();
  Progress("filling the caches");
  const std::vector<Side> sides = SidesOf(options.sequences);
  absl::StatusOr<std::vector<Measured>> measured = Race(*shared, **daemon, sides, options).Run();
  if (!measured.ok()) return measured.status();
  std::size_t own = 0;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    if (sides[i].policy.empty()) own = i;
    report.Add(RowOf(sides[i], (*measured)[i],
                     sides[i].policy.empty() ? nullptr : &(*measured)[own], options.workers));
  }
  report.notes = {
      Concat(options.workers, " workers, each with batches of 1 and ", options.sequences,
             " sequences of ", shared->prompt.size(), " tokens and more; the recall model, ",
             "one thread a worker"),
      Concat("own: a dense cache in the worker's memory, read by the same kernels; slices of ",
             kSliceSteps,
             " steps, and one before them that is not counted, take turns in an order "
             "that is drawn for each round"),
      "ratio: time of a slice against the baseline's, median over rounds; p50, p99: of one step, "
      "which is a token of every sequence",
      "daemon %: of one core, while the batch decoded"};
  return report;
}

}  // namespace tessera::cli::bench
