#include "client/bench/prefix_match.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/bench/bench.h"
#include "client/bench/workload/sharing_worker.h"
#include "client/bench/workload/synthetic.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kTokens = 64;  // per prefix
constexpr std::uint32_t kAsked = 96;   // per request: a prefix, and one unpublished block
constexpr SyntheticShape kShape = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 64};

constexpr std::uint32_t kSessions = 16;  // they take turns

constexpr char kTenants[] =
    R"({"tenants": [{"name": "default"}, {"name": "stranger", "token": "stranger"}]})";

using Micros = std::chrono::duration<double, std::micro>;

// A daemon with a number of prefixes, and workers that match them.
class Library {
 public:
  static absl::StatusOr<std::unique_ptr<Library>> Open(std::uint32_t prefixes) {
    absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start(
        {Concat("--max-prefixes-per-tenant=", prefixes), "--pool-bytes=2GiB"}, kTenants);
    if (!daemon.ok()) return daemon.status();
    std::unique_ptr<Library> library(new Library(*std::move(daemon), prefixes));
    for (std::uint32_t i = 0; i < kSessions; ++i) {
      absl::Status status = library->Attach("", library->sessions_);
      if (status.ok()) status = library->Attach("stranger", library->strangers_);
      if (!status.ok()) return status;
    }
    if (absl::Status status = library->Publish(); !status.ok()) return status;
    return library;
  }

  // Matches a random published prefix.
  absl::Status Ask() {
    Session& session = sessions_[times_.size() % sessions_.size()];
    return Ask(session, static_cast<std::uint32_t>(random_() % prefixes_), kTokens, times_);
  }
  // Another tenant's requests: for a prefix that the first tenant has published, and for one that
  // does not exist. The order alternates.
  absl::Status MatchAsOtherTenant() {
    const bool begins = nobodys_.size() % 2 == 0;
    for (const bool there : {begins, !begins}) {
      std::vector<double>& times = there ? anothers_ : nobodys_;
      Session& session = strangers_[times.size() % strangers_.size()];
      const auto which = static_cast<std::uint32_t>(random_() % prefixes_);
      absl::Status status = Ask(session, there ? which : prefixes_ + which, 0, times);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  std::uint32_t prefixes() const { return prefixes_; }
  const std::vector<double>& times() const { return times_; }
  const std::vector<double>& anothers() const { return anothers_; }
  const std::vector<double>& nobodys() const { return nobodys_; }

 private:
  struct Session {
    std::unique_ptr<client::Worker> worker;
    client::Model model;
  };
  Library(std::unique_ptr<LocalDaemon> daemon, std::uint32_t prefixes)
      : daemon_(std::move(daemon)), prefixes_(prefixes) {}

  absl::Status Attach(const std::string& token, std::vector<Session>& sessions) {
    absl::StatusOr<std::unique_ptr<client::Worker>> worker = client::Worker::Attach(
        {.address = daemon_->address(), .tenant_token = token, .worker_name = "bench"});
    if (!worker.ok()) return worker.status();
    absl::StatusOr<client::Model> model = (*worker)->RegisterModel(kShape.Geometry());
    if (!model.ok()) return model.status();
    sessions.push_back({*std::move(worker), *std::move(model)});
    return absl::OkStatus();
  }

  absl::Status Ask(Session& session, std::uint32_t prefix, std::uint64_t expected,
                   std::vector<double>& times) {
    const std::vector<std::uint32_t> ids = TokenIds(kAsked, prefix);
    const Clock::time_point begun = Clock::now();
    const absl::StatusOr<client::PrefixMatch> match =
        session.worker->Match(session.model, {.tokens = ids});
    const Micros taken = Clock::now() - begun;
    if (!match.ok()) return match.status();
    if (match->tokens != expected) {
      return absl::InternalError(Concat(match->tokens, " tokens matched; expected ", expected));
    }
    times.push_back(taken.count());
    return absl::OkStatus();
  }

  // Publishes the same sequence under different ids: only the lookup is measured.
  absl::Status Publish() {
    absl::StatusOr<client::Sequence> sequence =
        sessions_.front().worker->CreateSequence(sessions_.front().model);
    if (!sequence.ok()) return sequence.status();
    const std::vector<std::uint16_t> rows(kTokens * kShape.kv_row(), 0x3c00);
    absl::Status status =
        sequence->Append({.key = BytesOf(rows), .value = BytesOf(rows), .tokens = kTokens})
            .status();
    for (std::uint32_t i = 0; i < prefixes_ && status.ok(); ++i) {
      if (i % 10'000 == 0) Progress(Concat(i, " of ", prefixes_, " prefixes"));
      status = sequence->Publish(TokenIds(kTokens, i)).status();
    }
    return status;
  }

  const std::unique_ptr<LocalDaemon> daemon_;
  const std::uint32_t prefixes_;
  std::vector<Session> sessions_;
  std::vector<Session> strangers_;
  std::mt19937_64 random_{1};
  std::vector<double> times_;
  std::vector<double> anothers_;
  std::vector<double> nobodys_;
};

// Whether response times reveal the prefixes of another tenant.
void AddStrangers(const Library& library, int rounds, Report& report) {
  for (const auto& [name, share] : {std::pair{"p50", 0.5}, std::pair{"p99", 0.99}}) {
    const double nobodys = Percentile(library.nobodys(), share);
    report.Add({.name = Concat("match_", name, "_of_nobodys"), .value = nobodys, .unit = "us"});
    Row row = {.name = Concat("match_", name, "_of_anothers"),
               .value = Percentile(library.anothers(), share),
               .unit = "us",
               .baseline = Concat("match_", name, "_of_nobodys"),
               .sense = Goal::kAtMost};
    row.ratio = row.value / nobodys;
    if (share == 0.5) row.goal = 1.1;
    report.Add(std::move(row));
  }
  report.notes.push_back(Concat(
      "match_*_of_anothers: Match by another tenant, which finds nothing, for prefixes that the "
      "first tenant has published; _of_nobodys: for prefixes that do not exist. ",
      rounds, " calls each, alternating, in the daemon with ", library.prefixes(), " prefixes"));
}

}  // namespace

absl::Status MeasureMatch(bool quick, Report& report) {
  std::vector<std::unique_ptr<Library>> libraries;
  for (const std::uint32_t prefixes : {10u, 1000u, quick ? 10'000u : 100'000u}) {
    absl::StatusOr<std::unique_ptr<Library>> library = Library::Open(prefixes);
    if (!library.ok()) return library.status();
    libraries.push_back(*std::move(library));
  }
  Progress("matching");
  const int rounds = quick ? 500 : 5000;
  for (int round = 0; round < rounds; ++round) {
    // Rotate the order, so that each daemon is first equally often.
    for (std::size_t i = 0; i < libraries.size(); ++i) {
      absl::Status status = libraries[(round + i) % libraries.size()]->Ask();
      if (!status.ok()) return status;
    }
    if (absl::Status status = libraries.back()->MatchAsOtherTenant(); !status.ok()) return status;
  }
  for (const auto& [name, share] : {std::pair{"p50", 0.5}, std::pair{"p99", 0.99}}) {
    const double few = Percentile(libraries.front()->times(), share);
    for (const std::unique_ptr<Library>& library : libraries) {
      Row row = {.name = Concat("match_", name, "_of_", library->prefixes()),
                 .value = Percentile(library->times(), share),
                 .unit = "us",
                 .sense = Goal::kAtMost};
      if (library != libraries.front()) {
        row.baseline = Concat("match_", name, "_of_", libraries.front()->prefixes());
        row.ratio = row.value / few;
        if (share == 0.5) row.goal = 1.5;
      }
      report.Add(std::move(row));
    }
  }
  report.notes.push_back(
      Concat("match_*_of_N: one Match call over the socket with ", kAsked,
             " token ids, of which the first ", kTokens,
             " are published, in a daemon with N prefixes that share no block. ", rounds,
             " calls per daemon, from ", kSessions,
             " sessions in turn; the daemons take turns. All prefixes use the same rows"));
  AddStrangers(*libraries.back(), rounds, report);
  return absl::OkStatus();
}

}  // namespace tessera::cli::bench
