// tessera bench scale: latency of creating, filling, forking and freeing a sequence while few or
// many others are alive. Each number of live sequences has its own daemon; the daemons take turns,
// so that all see the same load of the machine.

#include <array>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/bench/bench.h"
#include "client/bench/workload/synthetic.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "kernels/format/tile_shape.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kSessions = 16;
constexpr std::uint32_t kLiving[] = {10, 100, 1000};
constexpr std::uint64_t kTokens = kernels::kTileEntries;  // per sequence: one tile in every lane
// Twice what the sequences need, in GiB, so that nothing is offloaded.
std::uint64_t PoolGib(std::uint64_t sequence_bytes, std::uint32_t living) {
  return 2 + (2 * living * sequence_bytes >> 30);
}

// The timed operations, in order.
enum Op : std::uint8_t { kCreate, kAppend, kFork, kFreeFork, kFree };
constexpr const char* kOpNames[] = {"create", "append_first_tile", "fork", "free_fork", "free"};
constexpr std::size_t kOps = std::size(kOpNames);
using Times = std::array<std::vector<double>, kOps>;  // microseconds

// Calls `act` and records its time if it succeeds.
template <typename Act>
absl::Status Timed(std::vector<double>& times, const Act& act) {
  const Clock::time_point begun = Clock::now();
  absl::Status status = act();
  const std::chrono::duration<double, std::micro> taken = Clock::now() - begun;
  if (status.ok()) times.push_back(taken.count());
  return status;
}

// A daemon, and sessions that keep `living` sequences alive.
class Population {
 public:
  static absl::StatusOr<std::unique_ptr<Population>> Open(const SyntheticShape& shape,
                                                          const SyntheticSequence& rows,
                                                          std::uint32_t living) {
    const std::uint64_t each = shape.layers * shape.kv_row() * kTokens * 2 * sizeof(std::uint16_t);
    absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start(
        {Concat("--pool-bytes=", PoolGib(each, living), "GiB"), "--staging-bytes=8MiB"});
    if (!daemon.ok()) return daemon.status();
    std::unique_ptr<Population> population(new Population(*std::move(daemon), rows));
    for (std::uint32_t i = 0; i < kSessions; ++i) {
      absl::StatusOr<std::unique_ptr<client::Worker>> worker = client::Worker::Attach(
          {.address = population->daemon_->address(), .worker_name = "bench"});
      if (!worker.ok()) return worker.status();
      absl::StatusOr<client::Model> model = (*worker)->RegisterModel(shape.Geometry());
      if (!model.ok()) return model.status();
      population->sessions_.push_back({*std::move(worker), *std::move(model)});
    }
    for (std::uint32_t i = 0; i < living; ++i) {
      client::Sequence sequence;
      if (absl::Status status = population->Begin(sequence, population->growing_); !status.ok()) {
        return status;
      }
      population->living_.push_back(std::move(sequence));
    }
    // A session creates its staging arena at its first append. With few sequences, some sessions
    // have not appended yet.
    for (std::uint32_t i = 0; i < kSessions; ++i) {
      if (absl::Status status = population->OneMore(); !status.ok()) return status;
    }
    population->steady_ = {};
    return population;
  }

  // Runs all operations on one more sequence and on a fork of a live one.
  absl::Status OneMore() {
    client::Sequence sequence;
    absl::Status status = Begin(sequence, steady_);
    if (!status.ok()) return status;
    client::Sequence& parent = living_[random_() % living_.size()];
    absl::StatusOr<client::Sequence> fork;
    status = Timed(steady_[kFork], [&] { return (fork = parent.Fork()).status(); });
    if (status.ok()) status = Timed(steady_[kFreeFork], [&] { return fork->Free(); });
    if (status.ok()) status = Timed(steady_[kFree], [&] { return sequence.Free(); });
    return status;
  }

  std::size_t living() const { return living_.size(); }
  const Times& growing() const { return growing_; }
  const Times& steady() const { return steady_; }

 private:
  struct Session {
    std::unique_ptr<client::Worker> worker;
    client::Model model;
  };
  Population(std::unique_ptr<LocalDaemon> daemon, const SyntheticSequence& rows)
      : daemon_(std::move(daemon)),
        key_(rows.KeysOfAllLayers(0, kTokens)),
        value_(rows.ValuesOfAllLayers(0, kTokens)) {}

  // Creates and fills a sequence in the next session.
  absl::Status Begin(client::Sequence& sequence, Times& times) {
    Session& session = sessions_[begun_++ % sessions_.size()];
    absl::StatusOr<client::Sequence> created;
    absl::Status status = Timed(times[kCreate], [&] {
      return (created = session.worker->CreateSequence(session.model)).status();
    });
    if (!status.ok()) return status;
    sequence = *std::move(created);
    return Timed(times[kAppend], [&] {
      return sequence.Append({.key = BytesOf(key_), .value = BytesOf(value_), .tokens = kTokens})
          .status();
    });
  }

  const std::unique_ptr<LocalDaemon> daemon_;
  const std::vector<std::uint16_t> key_;
  const std::vector<std::uint16_t> value_;
  std::vector<Session> sessions_;
  std::vector<client::Sequence> living_;
  std::mt19937_64 random_{1};
  std::uint64_t begun_ = 0;
  Times growing_;
  Times steady_;
};

void AddRows(const char* op, std::size_t living, const std::vector<double>& times,
             const std::vector<double>* few, Report& report) {
  for (const auto& [name, share] : {std::pair{"p50", 0.5}, std::pair{"p99", 0.99}}) {
    Row row = {.name = Concat(op, "_", name, "_at_", living),
               .value = Percentile(times, share),
               .unit = "us",
               .sense = Goal::kAtMost};
    if (few != nullptr) {
      row.baseline = Concat(op, "_", name, "_at_", kLiving[0]);
      row.ratio = row.value / Percentile(*few, share);
      if (share == 0.5) row.goal = 1.5;
    }
    report.Add(std::move(row));
  }
}

}  // namespace

absl::StatusOr<Report> RunScale(const Options& options) {
  Report report{.name = "scale"};
  const SyntheticShape shape = {.layers = options.layers.value_or(options.quick ? 4 : 32),
                                .query_heads = 8,
                                .kv_heads = 8,
                                .head_dim = 128};
  SyntheticSequence rows(shape, options.seed);
  rows.Grow(kTokens);
  std::vector<std::unique_ptr<Population>> populations;
  for (const std::uint32_t living : kLiving) {
    Progress(Concat(living, " live sequences"));
    absl::StatusOr<std::unique_ptr<Population>> population = Population::Open(shape, rows, living);
    if (!population.ok()) return population.status();
    populations.push_back(*std::move(population));
  }
  const int rounds = options.quick ? 100 : 1000;
  for (int round = 0; round < rounds; ++round) {
    if (round % 100 == 0) Progress(Concat("round ", round, " of ", rounds));
    // Rotate the order, so that each daemon is first equally often.
    for (std::size_t i = 0; i < populations.size(); ++i) {
      Population& population = *populations[(round + i) % populations.size()];
      if (absl::Status status = population.OneMore(); !status.ok()) return status;
    }
  }
  for (std::size_t op = 0; op < kOps; ++op) {
    const std::vector<double>* few = nullptr;
    for (const std::unique_ptr<Population>& population : populations) {
      AddRows(kOpNames[op], population->living(), population->steady()[op], few, report);
      if (few == nullptr) few = &population->steady()[op];
    }
  }
  for (const Op op : {kCreate, kAppend}) {
    AddRows(Concat(kOpNames[op], "_growing").c_str(), populations.back()->living(),
            populations.back()->growing()[op], nullptr, report);
  }
  report.notes = {Concat("sequences of ", shape.layers * shape.kv_heads, " lanes with ", kTokens,
                         " dense tokens each, head_dim ", shape.head_dim, ", in ", kSessions,
                         " sessions that take turns, one call at a time"),
                  Concat("_at_N: a daemon with N other live sequences. ", rounds,
                         " sequences one after another in each; the daemons take turns"),
                  Concat("_growing: the first ", populations.back()->living(),
                         " sequences, while the pool grows by extents. fork: of a live sequence")};
  return report;
}

}  // namespace tessera::cli::bench
