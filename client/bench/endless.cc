#include "client/bench/endless.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/bench.h"
#include "client/bench/gauge.h"
#include "client/bench/workload/synthetic.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

constexpr std::uint64_t kBudget = 1024;
constexpr std::uint64_t kStretch = 20'000;  // tokens measured at the start and at the end
constexpr SyntheticShape kShape = {.layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64};

// Bytes of tiles in the tenant's pool now, including tiles waiting for compaction and replaced
// tiles waiting for readers.
absl::StatusOr<double> HeldNow(client::Worker& worker) {
  const absl::StatusOr<v1::StatsResponse> stats = client::StatsMessage(worker);
  if (!stats.ok()) return stats.status();
  return static_cast<double>(UsedBytes(stats->tenants(0), "tiles"));
}
absl::StatusOr<double> HeldAtRest(client::Worker& worker) {
  const absl::StatusOr<v1::TenantStats> stats = SettledStats(worker);
  if (!stats.ok()) return stats.status();
  return static_cast<double>(UsedBytes(*stats, "tiles"));
}

absl::Status Decode(client::Worker& worker, client::Sequence& sequence,
                    const SyntheticSequence& rows) {
  const std::uint64_t at = sequence.tokens() % rows.tokens();
  std::vector<float> output(kShape.query_row());
  std::vector<float> lse(kShape.query_heads);
  for (;;) {
    client::Sequence* const batch[] = {&sequence};
    absl::StatusOr<client::Step> step = worker.BeginStep(batch);
    if (!step.ok()) return step.status();
    absl::Status status;
    for (std::uint32_t layer = 0; layer < kShape.layers && status.ok(); ++layer) {
      const auto key = std::as_bytes(rows.Key(layer, at, 1));
      status = step->AppendAndAttend(layer, {.key = key,
                                             .value = std::as_bytes(rows.Value(layer, at, 1)),
                                             .query = key,
                                             .output = WritableBytesOf(output),
                                             .lse = lse});
    }
    if (status.ok()) status = step->End();
    if (!absl::IsAborted(status)) return status;
  }
}

// The name of a row and its option `pos`: original positions, or slots in the lane.
struct Way {
  const char* name;
  const char* positions;
};

absl::Status Generate(const Way& way, std::uint64_t tokens, client::Worker& worker,
                      const client::Model& model, Report& report) {
  absl::StatusOr<client::Sequence> sequence = worker.CreateSequence(
      model, Concat("lacache:span=2,overlap=1,budget=", kBudget, ",pos=", way.positions));
  if (!sequence.ok()) return sequence.status();
  SyntheticSequence rows(kShape, 1);
  rows.Grow(4096);
  std::vector<double> early;
  std::vector<double> late;
  double most = 0;
  for (std::uint64_t token = 0; token < tokens; ++token) {
    absl::Status status = Decode(worker, *sequence, rows);
    if (!status.ok()) return status;
    if (token % 1000 != 999) continue;
    if (token % 10'000 == 9'999) {
      Progress(Concat(way.name, ": ", token + 1, " of ", tokens, " tokens"));
    }
    const absl::StatusOr<double> now = HeldNow(worker);
    if (!now.ok()) return now.status();
    most = std::max(most, *now);
    const bool begins = token < kStretch;
    if (!begins && token + kStretch < tokens) continue;
    const absl::StatusOr<double> held = HeldAtRest(worker);
    if (!held.ok()) return held.status();
    (begins ? early : late).push_back(*held);
  }
  if (absl::Status status = sequence->Compress().status(); !status.ok()) return status;
  const absl::StatusOr<v1::DescribeResponse> described =
      client::DescribeMessage(*sequence, client::Detail::kLanes);
  if (!described.ok()) return described.status();
  // Measured while idle: the number of waiting tiles depends on the load of the machine.
  report.Add({.name = way.name,
              .value = *std::ranges::max_element(late) / 1024,
              .unit = "KiB of tiles",
              .baseline = Concat("the first ", kStretch, " tokens"),
              .ratio = *std::ranges::max_element(late) / *std::ranges::max_element(early),
              .goal = 1.05,
              .sense = Goal::kAtMost});
  report.notes.push_back(Concat(way.name, ": ", described->tokens(), " tokens generated, ",
                                described->lane(0).entries(), " entries per lane at the end, ",
                                "next position ", sequence->next_position(), ", peak ",
                                static_cast<std::uint64_t>(most / 1024),
                                " KiB of tiles, including tiles waiting for compaction or for "
                                "readers"));
  return sequence->Free();
}

}  // namespace

absl::Status MeasureEndless(std::uint64_t tokens, Report& report) {
  const absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start({});
  if (!daemon.ok()) return daemon.status();
  const absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = (*daemon)->address(), .worker_name = "endless"});
  if (!worker.ok()) return worker.status();
  client::ModelGeometry geometry = kShape.Geometry();
  geometry.rope.theta = 10000;  // needed to re-rotate keys
  const absl::StatusOr<client::Model> model = (*worker)->RegisterModel(geometry);
  if (!model.ok()) return model.status();
  for (const Way& way : {Way{"lacache_endless", "original"}, Way{"lacache_endless_slot", "slot"}}) {
    absl::Status status = Generate(way, tokens, **worker, *model, report);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace tessera::cli::bench
