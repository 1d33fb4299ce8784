#include "client/cli/status.h"

#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstdio>

#include "client/cli/command.h"
#include "client/tools/connection.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

absl::StatusOr<Look> ReadDaemonState(Admin& admin, std::uint32_t sequence_limit) {
  Look look;
  absl::StatusOr<v1::StatsResponse> stats = admin.Stats();
  if (!stats.ok()) return stats.status();
  look.stats = *std::move(stats);
  absl::StatusOr<v1::ListSessionsResponse> sessions = admin.Sessions();
  if (!sessions.ok()) return sessions.status();
  look.sessions = *std::move(sessions);
  absl::StatusOr<v1::ListSequencesResponse> sequences = admin.Sequences(sequence_limit);
  if (!sequences.ok()) return sequences.status();
  look.sequences = *std::move(sequences);
  return look;
}

namespace {

std::string RenderHead(const v1::StatsResponse& stats) {
  const double share = stats.pool_limit_bytes() == 0
                           ? 0
                           : static_cast<double>(stats.pool_reserved_bytes()) /
                                 static_cast<double>(stats.pool_limit_bytes());
  return Concat("tesserad ", stats.version(), "   device ", stats.device(), "   kernels ",
                stats.implementation(), "   up ", Age(stats.uptime_seconds()),
                stats.draining() ? "   DRAINING" : "", "\n", "memory ", Bar(share, 30), " ",
                FormatBytes(stats.pool_reserved_bytes()), " of ",
                FormatBytes(stats.pool_limit_bytes()), "   host tier ",
                FormatBytes(stats.host_tier_bytes()), " of ",
                FormatBytes(stats.host_tier_limit_bytes()), "   sessions ", stats.sessions(), "\n");
}

// One line on background compaction: running and queued jobs, and totals.
std::string RenderCompaction(const v1::CompactionStats& stats) {
  const auto jobs = [&](int priority) {
    if (priority >= stats.jobs_queued_size()) return std::string("-");
    return Concat(stats.jobs_running(priority), "+", stats.jobs_queued(priority));
  };
  return Concat(
      "compaction   jobs running+queued: tails ", jobs(0), ", seals ", jobs(1), ", pressure ",
      jobs(2), "   tiles ", Short(static_cast<double>(stats.tiles_encoded())),
      "   segments sealed ", Short(static_cast<double>(stats.segments_sealed())), "   raw copies ",
      FormatBytes(stats.raw_copy_bytes()), " of ", FormatBytes(stats.raw_copy_limit_bytes()), "\n");
}

const v1::TenantStats* Find(const Look* look, const std::string& name) {
  if (look == nullptr) return nullptr;
  for (const v1::TenantStats& tenant : look->stats.tenants()) {
    if (tenant.name() == name) return &tenant;
  }
  return nullptr;
}

std::string Rate(const Look* before, double seconds, const v1::TenantStats& now,
                 std::uint64_t (v1::TenantStats::*count)() const) {
  const v1::TenantStats* then = Find(before, now.name());
  if (then == nullptr || seconds <= 0) return "-";
  return Short(static_cast<double>((now.*count)() - (then->*count)()) / seconds);
}

std::string RenderTenants(const Look& look, const Look* before, double seconds) {
  Table table({{"tenant", Align::kLeft},
               {"used"},
               {"tiles"},
               {"tails"},
               {"extents"},
               {"sessions"},
               {"sequences"},
               {"decoding"},
               {before ? "appended/s" : "appended"},
               {before ? "absorbed/s" : "absorbed"},
               {before ? "attends/s" : "attends"},
               {"retired"},
               {"offloaded"},
               {"revoked"},
               {"ring waits"}});
  for (const v1::TenantStats& tenant : look.stats.tenants()) {
    const auto tagged = [&](const char* tag) {
      const auto it = tenant.used_bytes_by_tag().find(tag);
      return FormatBytes(it == tenant.used_bytes_by_tag().end() ? 0 : it->second);
    };
    const auto figure = [&](std::uint64_t (v1::TenantStats::*count)() const) {
      return before ? Rate(before, seconds, tenant, count)
                    : Short(static_cast<double>((tenant.*count)()));
    };
    table.Add(
        {tenant.name(), FormatBytes(tenant.used_bytes()), tagged("tiles"), tagged("tails"),
         Concat(tenant.pool_extents(), " x ", FormatBytes(tenant.pool_extent_bytes())),
         Short(tenant.sessions()), Short(tenant.sequences()), Short(tenant.decoding_sequences()),
         figure(&v1::TenantStats::tokens_appended), figure(&v1::TenantStats::tail_tokens_absorbed),
         figure(&v1::TenantStats::attend_requests), FormatBytes(tenant.retired_bytes()),
         FormatBytes(tenant.offloaded_bytes()), Short(static_cast<double>(tenant.pins_revoked())),
         Short(static_cast<double>(tenant.tail_full_waits()))});
  }
  return table.Render();
}

std::string RenderSessions(const Look& look) {
  Table table({{"session"},
               {"tenant", Align::kLeft},
               {"worker", Align::kLeft},
               {"age"},
               {"transport", Align::kLeft},
               {"sequences"},
               {"decoding"},
               {"pins"}});
  for (const v1::SessionInfo& session : look.sessions.sessions()) {
    table.Add({Concat(session.session_id()), session.tenant(),
               session.worker_name().empty() ? "-" : session.worker_name(),
               Age(session.age_seconds()), session.mapped() ? "mapped" : "rpc",
               Concat(session.sequences()), Concat(session.decoding_sequences()),
               Concat(session.pinned_slots())});
  }
  return table.empty() ? "no sessions\n" : table.Render();
}

// "packed int8 32/128 g2 mean8 93%, dense bf16 7%": kept channels, group, block summaries, and the
// share of the sequence's entries.
std::string FormOf(const v1::SequenceInfo& sequence) {
  std::uint64_t entries = 0;
  for (const v1::SegmentRun& run : sequence.form()) entries += run.entries();
  std::string text;
  for (const v1::SegmentRun& run : sequence.form()) {
    Append(text, text.empty() ? "" : ", ", run.format());
    if (run.kept_channels() != 0) {
      Append(text, " ", run.kept_channels(), "/", run.channels());
      if (run.value_kept_channels() != run.kept_channels()) {
        Append(text, "+", run.value_kept_channels(), "/", run.value_channels());
      }
      Append(text, " g", run.group());
    }
    if (run.summary() == v1::BLOCK_SUMMARY_MEAN) Append(text, " mean", run.block());
    if (run.summary() == v1::BLOCK_SUMMARY_MIN_MAX) Append(text, " minmax", run.block());
    if (run.entries() != entries) Append(text, " ", 100 * run.entries() / entries, "%");
  }
  return text.empty() ? "-" : text;
}

std::string StateOf(const v1::SequenceInfo& sequence) {
  if (sequence.state() == v1::SEQUENCE_STATE_FAILED) return "FAILED";
  if (sequence.state() == v1::SEQUENCE_STATE_OFFLOADED) {
    return Concat("offloaded ", FormatBytes(sequence.offloaded_bytes()));
  }
  return sequence.decoding() ? "decoding" : "idle";
}

std::string RenderSequences(const Look& look, std::size_t rows) {
  Table table({{"sequence"},
               {"tenant", Align::kLeft},
               {"model", Align::kLeft},
               {"policy", Align::kLeft},
               {"tokens"},
               {"tiles"},
               {"format", Align::kLeft},
               {"state", Align::kLeft}});
  const auto& sequences = look.sequences.sequences();
  const std::size_t shown = std::min<std::size_t>(rows, sequences.size());
  for (std::size_t i = 0; i < shown; ++i) {
    const v1::SequenceInfo& sequence = sequences[static_cast<int>(i)];
    table.Add({Concat(sequence.sequence_id()), sequence.tenant(), sequence.model(),
               sequence.policy(), Concat(sequence.tokens()), FormatBytes(sequence.tile_bytes()),
               FormOf(sequence), StateOf(sequence)});
  }
  if (table.empty()) return "no sequences\n";
  std::string out = table.Render();
  if (look.sequences.total() > shown) {
    Append(out, "... and ", look.sequences.total() - shown, " more\n");
  }
  return out;
}

}  // namespace

std::string RenderText(const Look& look, const Look* before, double seconds,
                       std::size_t sequence_rows) {
  return Concat(RenderHead(look.stats) + RenderCompaction(look.stats.compaction()), "\n",
                RenderTenants(look, before, seconds), "\n", RenderSessions(look), "\n",
                RenderSequences(look, sequence_rows));
}

std::string RenderJson(const Look& look) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  const auto json = [&](const google::protobuf::Message& message) {
    std::string text;
    if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return text;
    return text;
  };
  return Concat("{\"stats\":", json(look.stats), ",\"sessions\":", json(look.sessions),
                ",\"sequences\":", json(look.sequences), "}\n");
}

int RunStatus(std::span<const std::string_view> args) {
  return RunWithFlags(
      Flags("Usage: tessera status [--json] [--address=ADDRESS]\n\n"
            "Shows the memory, tenants, sessions and sequences of a daemon.\n\n"
            "Example:\n"
            "  tessera status --sequences=50",
            WithConnection({{"json", "", "Print one JSON object instead of tables.", ""},
                            {"sequences", "N", "Sequences to list.", "20"}})),
      args, [](const Flags& flags) -> absl::Status {
        absl::StatusOr<std::uint64_t> rows = flags.Number("sequences", 0, 100000);
        if (!rows.ok()) return rows.status();
        absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
        if (!admin.ok()) return admin.status();
        absl::StatusOr<Look> look =
            ReadDaemonState(*admin, static_cast<std::uint32_t>(std::max<std::uint64_t>(*rows, 1)));
        if (!look.ok()) return look.status();
        const std::string text =
            flags.Has("json") ? RenderJson(*look) : RenderText(*look, nullptr, 0, *rows);
        std::fputs(text.c_str(), stdout);
        return absl::OkStatus();
      });
}

int RunEvict(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags(
          "Usage: tessera evict ID... [--address=ADDRESS]\n\n"
          "Frees sequences or published prefixes of any tenant. Workers that still use an evicted\n"
          "sequence get NOT_FOUND. An evicted prefix is no longer matched.\n\n"
          "Example:\n"
          "  tessera evict 4711 4712",
          WithConnection({})),
      args, [](const Flags& flags) -> absl::Status {
        if (flags.positional().empty()) {
          return absl::InvalidArgumentError(
              "no id given; 'tessera status' lists sequences, 'tessera prefixes' prefixes");
        }
        absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
        if (!admin.ok()) return admin.status();
        for (const std::string& text : flags.positional()) {
          const std::uint64_t id = WholeNumber(text).value_or(0);
          if (id == 0) {
            return absl::InvalidArgumentError(
                Concat("\"", text, "\" is not the id of a sequence or prefix"));
          }
          if (absl::Status status = admin->Evict(id); !status.ok()) return status;
          std::printf("freed %s\n", text.c_str());
        }
        return absl::OkStatus();
      });
}

int RunDrain(std::span<const std::string_view> args) {
  return RunWithFlags(
      Flags("Usage: tessera drain [--limit-ms=MS] [--address=ADDRESS]\n\n"
            "Drains a daemon: it refuses new sessions, notifies its workers, and exits when the\n"
            "last session has ended or the limit has passed.\n\n"
            "Example:\n"
            "  tessera drain --limit-ms=30000",
            WithConnection({{"limit-ms", "MS",
                             "Exit after this time at the latest. 0: as configured.", "0"}})),
      args, [](const Flags& flags) -> absl::Status {
        absl::StatusOr<std::uint64_t> limit = flags.Number("limit-ms", 0, 3'600'000);
        if (!limit.ok()) return limit.status();
        absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
        if (!admin.ok()) return admin.status();
        absl::StatusOr<v1::DrainResponse> drain = admin->Drain(*limit);
        if (!drain.ok()) return drain.status();
        std::printf("draining; %u sessions still attached\n", drain->sessions());
        return absl::OkStatus();
      });
}

}  // namespace tessera::cli
