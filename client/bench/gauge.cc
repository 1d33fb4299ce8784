#include "client/bench/gauge.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/bench.h"
#include "client/bench/workload/synthetic.h"
#include "client/bench/workload/working_set.h"
#include "client/session/kernel_types.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

bool AtRest(const v1::StatsResponse& stats) {
  const auto none = [](const auto& jobs) {
    return std::ranges::all_of(jobs, [](std::uint64_t count) { return count == 0; });
  };
  return none(stats.compaction().jobs_queued()) && none(stats.compaction().jobs_running()) &&
         stats.tenants(0).retired_bytes() == 0;
}

}  // namespace

absl::StatusOr<v1::TenantStats> SettledStats(client::Worker& worker) {
  constexpr int kPatience = 5000;  // of 1 ms
  for (int i = 0; i < kPatience; ++i) {
    absl::StatusOr<v1::StatsResponse> stats = client::StatsMessage(worker);
    if (!stats.ok()) return stats.status();
    if (stats->tenants_size() != 1) {
      return absl::InternalError(
          Concat("expected one tenant; the daemon has ", stats->tenants_size(), " tenants"));
    }
    if (AtRest(*stats)) return stats->tenants(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return absl::DeadlineExceededError("the daemon is not idle after 5 s");
}

std::uint64_t UsedBytes(const v1::TenantStats& stats, const std::string& tag) {
  const auto found = stats.used_bytes_by_tag().find(tag);
  return found == stats.used_bytes_by_tag().end() ? 0 : found->second;
}

absl::Status AddPoolGauge(const kernels::TileShape& tile, Report& report) {
  Progress("bytes per token in a daemon's pool");
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start({});
  if (!daemon.ok()) return daemon.status();
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = (*daemon)->address(), .worker_name = "bench"});
  if (!worker.ok()) return worker.status();
  absl::StatusOr<client::Model> model = (*worker)->RegisterModel(
      {.name = "one lane",
       .layers = {{.query_heads = 1, .kv_heads = 1, .head_dim = tile.head_dim}}});
  if (!model.ok()) return model.status();
  absl::StatusOr<client::Sequence> sequence = (*worker)->CreateSequence(*model);
  if (!sequence.ok()) return sequence.status();

  std::vector<std::uint16_t> rows(std::size_t{kSegmentEntries} * tile.head_dim);
  std::mt19937_64 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (std::uint16_t& element : rows) element = kernels::FloatToBf16(uniform(random));
  absl::Status status =
      sequence->Append({.key = BytesOf(rows), .value = BytesOf(rows), .tokens = kSegmentEntries})
          .status();
  if (!status.ok()) return status;

  const std::vector<std::byte> rotations = RandomRotations(tile);
  const std::span<const std::byte> all = rotations;
  status = sequence
               ->Compress({.kept_channels = tile.key.kept,
                           .group = tile.group,
                           .values = client::FromKernels(kernels::ValuesOf(tile.format)),
                           .summary = client::FromKernels(tile.summary),
                           .block = tile.block},
                          {.key = all.first(all.size() / 2), .value = all.last(all.size() / 2)})
               .status();
  if (!status.ok()) return status;
  const absl::StatusOr<v1::TenantStats> stats = SettledStats(**worker);
  if (!stats.ok()) return stats.status();
  const std::uint64_t bytes = UsedBytes(*stats, "tiles") + UsedBytes(*stats, "rotations");
  const double per_token = static_cast<double>(bytes) / kSegmentEntries;
  const double dense = 2.0 * 2 * tile.head_dim;
  report.Add({.name = Concat("bytes_per_token_d", tile.head_dim, "_e", tile.group),
              .value = per_token,
              .unit = "B",
              .baseline = Concat("dense, ", dense, " B"),
              .ratio = dense / per_token,
              .goal = 2.99});
  return absl::OkStatus();
}

}  // namespace tessera::cli::bench
