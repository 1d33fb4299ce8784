// tessera bench pressure: throughput while workers hold more than the pool. Each load has its own
// daemon, and the daemons take turns. The workers cycle through their sequences like conversations:
// a few tokens of one, then of the next.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/bench/bench.h"
#include "client/bench/workload/synthetic.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr SyntheticShape kShape = {.layers = 4, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t kWorkers = 4;
constexpr std::uint64_t kTokens = 1024;  // 2 MiB
constexpr std::uint64_t kPoolMib = 128;
constexpr std::uint64_t kSequenceMib = 2;
constexpr double kHeld[] = {0.5, 1, 1.5, 2, 4};  // sequences, as multiples of the pool
constexpr int kTurnSteps = 16;
constexpr double kSliceSeconds = 1;
// Wait before a retry after RESOURCE_EXHAUSTED.
constexpr std::chrono::milliseconds kRetry{20};

// A worker with its share of the sequences.
class ConversationWorker {
 public:
  static absl::StatusOr<std::unique_ptr<ConversationWorker>> Open(const std::string& address,
                                                                  const SyntheticSequence& rows,
                                                                  std::uint32_t sequences) {
    std::unique_ptr<ConversationWorker> talker(new ConversationWorker);
    absl::StatusOr<std::unique_ptr<client::Worker>> worker =
        client::Worker::Attach({.address = address, .worker_name = "bench"});
    if (!worker.ok()) return worker.status();
    talker->worker_ = *std::move(worker);
    absl::StatusOr<client::Model> model = talker->worker_->RegisterModel(kShape.Geometry());
    if (!model.ok()) return model.status();
    const std::vector<std::uint16_t> key = rows.KeysOfAllLayers(0, kTokens);
    const std::vector<std::uint16_t> value = rows.ValuesOfAllLayers(0, kTokens);
    for (std::uint32_t i = 0; i < sequences; ++i) {
      absl::StatusOr<client::Sequence> sequence = talker->worker_->CreateSequence(*model);
      if (!sequence.ok()) return sequence.status();
      talker->sequences_.push_back(*std::move(sequence));
      absl::Status status = talker->Insist([&] {
        return talker->sequences_.back()
            .Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = kTokens})
            .status();
      });
      if (!status.ok()) return status;
    }
    talker->refused_ = 0;
    return talker;
  }

  // Decodes a few tokens of the next sequence, then truncates it to its prompt.
  absl::Status Turn() {
    client::Sequence& sequence = sequences_[next_++ % sequences_.size()];
    const Clock::time_point begun = Clock::now();
    absl::Status status;
    for (int i = 0; i < kTurnSteps && status.ok(); ++i) {
      status = Insist([&] { return Step(sequence); });
    }
    if (status.ok()) status = Insist([&] { return sequence.Truncate(kTokens); });
    const std::chrono::duration<double, std::milli> taken = Clock::now() - begun;
    if (status.ok()) turn_ms_.push_back(taken.count());
    return status;
  }

  void Forget() {
    turn_ms_.clear();
    refused_ = 0;
  }
  const std::vector<double>& turn_ms() const { return turn_ms_; }
  std::uint64_t refused() const { return refused_; }

 private:
  ConversationWorker() : row_(kShape.query_row(), 0x3c00), output_(kShape.query_row()), lse_(4) {}

  // Retries after ABORTED and, with a wait, after RESOURCE_EXHAUSTED.
  template <typename Act>
  absl::Status Insist(const Act& act) {
    for (;;) {
      absl::Status status = act();
      if (absl::IsAborted(status)) continue;
      if (!absl::IsResourceExhausted(status)) return status;
      ++refused_;
      std::this_thread::sleep_for(kRetry);
    }
  }

  absl::Status Step(client::Sequence& sequence) {
    client::Sequence* batch[] = {&sequence};
    absl::StatusOr<client::Step> step = worker_->BeginStep(batch);
    if (!step.ok()) return step.status();
    const auto kv = std::as_bytes(std::span(row_).first(kShape.kv_row()));
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      absl::Status status = step->AppendAndAttend(layer, {.key = kv,
                                                          .value = kv,
                                                          .query = BytesOf(row_),
                                                          .output = WritableBytesOf(output_),
                                                          .lse = lse_});
      if (!status.ok()) return status;
    }
    return step->End();
  }

  std::unique_ptr<client::Worker> worker_;
  std::vector<client::Sequence> sequences_;
  std::vector<std::uint16_t> row_;
  std::vector<float> output_;
  std::vector<float> lse_;
  std::size_t next_ = 0;
  std::vector<double> turn_ms_;
  std::uint64_t refused_ = 0;
};

// A daemon whose workers hold `held` times its pool.
class Population {
 public:
  static absl::StatusOr<std::unique_ptr<Population>> Open(double held,
                                                          const SyntheticSequence& rows) {
    std::unique_ptr<Population> population(new Population(held));
    absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start(
        {Concat("--pool-bytes=", kPoolMib, "MiB"), "--pool-extent-bytes=2MiB",
         "--staging-bytes=4MiB", "--tail-extent-bytes=2MiB", "--host-tier-bytes=1GiB"});
    if (!daemon.ok()) return daemon.status();
    population->daemon_ = *std::move(daemon);
    const auto sequences =
        static_cast<std::uint32_t>(held * kPoolMib / kSequenceMib / kWorkers + 0.5);
    for (std::uint32_t i = 0; i < kWorkers; ++i) {
      absl::StatusOr<std::unique_ptr<ConversationWorker>> talker =
          ConversationWorker::Open(population->daemon_->address(), rows, sequences);
      if (!talker.ok()) return talker.status();
      population->talkers_.push_back(*std::move(talker));
    }
    return population;
  }

  // Runs all workers at the same time for `seconds`.
  absl::Status Slice(double seconds) {
    std::atomic<bool> ends{false};
    std::vector<absl::Status> statuses(talkers_.size());
    std::vector<std::thread> threads;
    const std::size_t before = Turns();
    const Clock::time_point begun = Clock::now();
    for (std::size_t i = 0; i < talkers_.size(); ++i) {
      threads.emplace_back([&, i] {
        while (!ends && statuses[i].ok()) statuses[i] = talkers_[i]->Turn();
        ends = ends || !statuses[i].ok();
      });
    }
    const auto until = begun + std::chrono::duration<double>(seconds);
    while (!ends && Clock::now() < until) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ends = true;
    for (std::thread& thread : threads) thread.join();
    const std::chrono::duration<double> taken = Clock::now() - begun;
    rates_.push_back(static_cast<double>(Turns() - before) / taken.count());
    for (const absl::Status& status : statuses) {
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
  void Forget() {
    rates_.clear();
    for (const auto& talker : talkers_) talker->Forget();
  }

  double held() const { return held_; }
  const std::vector<double>& rates() const { return rates_; }  // turns/s of each slice
  std::vector<double> TurnMs() const {
    std::vector<double> all;
    for (const auto& talker : talkers_) {
      all.insert(all.end(), talker->turn_ms().begin(), talker->turn_ms().end());
    }
    return all;
  }
  // Turns of the worker with the fewest, relative to the mean.
  double LeastShare() const {
    std::size_t least = ~std::size_t{0};
    for (const auto& talker : talkers_) least = std::min(least, talker->turn_ms().size());
    return static_cast<double>(least * talkers_.size()) / static_cast<double>(Turns());
  }
  std::uint64_t Refused() const {
    std::uint64_t refused = 0;
    for (const auto& talker : talkers_) refused += talker->refused();
    return refused;
  }

 private:
  explicit Population(double held) : held_(held) {}
  std::size_t Turns() const {
    std::size_t turns = 0;
    for (const auto& talker : talkers_) turns += talker->turn_ms().size();
    return turns;
  }

  const double held_;
  std::unique_ptr<LocalDaemon> daemon_;
  std::vector<std::unique_ptr<ConversationWorker>> talkers_;
  std::vector<double> rates_;
};

void AddRows(const Population& population, const Population& unpressed, Report& report) {
  const std::string at = Concat("_at_", Figure(population.held()), "x");
  const std::vector<double> turn_ms = population.TurnMs();
  Row row = {.name = "turns" + at,
             .value = Median(population.rates()),
             .unit = "turns/s",
             .p50_ms = Median(turn_ms),
             .p99_ms = Percentile(turn_ms, 0.99)};
  if (&population != &unpressed) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < population.rates().size(); ++i) {
      ratios.push_back(population.rates()[i] / unpressed.rates()[i]);
    }
    row.baseline = report.rows.front().name;
    row.ratio = Median(ratios);
    row.paired = true;
    row.goal = 0.5;  // no load makes throughput collapse
  }
  report.Add(std::move(row));
  report.Add({.name = "least_worker" + at,
              .value = population.LeastShare(),
              .unit = "of the mean",
              .goal = 0.5,
              .goal_is_on_ratio = false});
  report.Add({.name = "refused" + at,
              .value = static_cast<double>(population.Refused()),
              .unit = "calls",
              .sense = Goal::kAtMost});
}

}  // namespace

absl::StatusOr<Report> RunPressure(const Options& options) {
  Report report{.name = "pressure"};
  SyntheticSequence rows(kShape, options.seed);
  rows.Grow(kTokens);
  std::vector<std::unique_ptr<Population>> populations;
  for (const double held : kHeld) {
    Progress(Concat("workers with ", Figure(held), " times the pool"));
    absl::StatusOr<std::unique_ptr<Population>> population = Population::Open(held, rows);
    if (!population.ok()) return population.status();
    populations.push_back(*std::move(population));
  }
  const int rounds = options.quick ? 2 : 12;
  for (int round = 0; round <= rounds; ++round) {
    Progress(Concat("round ", round, " of ", rounds));
    for (const std::unique_ptr<Population>& population : populations) {
      if (absl::Status status = population->Slice(kSliceSeconds); !status.ok()) return status;
      if (round == 0) population->Forget();
    }
  }
  for (const std::unique_ptr<Population>& population : populations) {
    AddRows(*population, *populations.front(), report);
  }
  report.notes = {
      Concat(kWorkers, " workers with dense sequences of ", kTokens, " tokens, ", kSequenceMib,
             " MiB each, in a pool of ", kPoolMib, " MiB. A turn decodes ", kTurnSteps,
             " tokens of one sequence, which is then truncated"),
      Concat("_at_Nx: all sequences together are N times the pool; the rest is in the host tier. "
             "The daemons take turns of ",
             kSliceSeconds, " s, ", rounds, " each"),
      Concat("least_worker: turns of the worker with the fewest. refused: calls that got "
             "RESOURCE_EXHAUSTED; the worker retries after ",
             kRetry.count(), " ms")};
  return report;
}

}  // namespace tessera::cli::bench
