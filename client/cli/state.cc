#include "client/cli/state.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <numeric>
#include <optional>

#include "client/tools/short_id.h"
#include "client/tools/terminal.h"
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

using TenantCount = std::uint64_t (v1::TenantStats::*)() const;

const v1::TenantStats* Find(const Look* look, const std::string& name) {
  if (look == nullptr) return nullptr;
  for (const v1::TenantStats& tenant : look->stats.tenants()) {
    if (tenant.name() == name) return &tenant;
  }
  return nullptr;
}

// nullopt: the tenant is new.
std::optional<double> Rate(const Since& since, const v1::TenantStats& now, TenantCount count) {
  const v1::TenantStats* const then = Find(since.look, now.name());
  if (then == nullptr || since.seconds <= 0) return std::nullopt;
  return static_cast<double>((now.*count)() - (then->*count)()) / since.seconds;
}

std::string Counted(const Since& since, const v1::TenantStats& tenant, TenantCount count) {
  if (since.look == nullptr) return Short(static_cast<double>((tenant.*count)()));
  const std::optional<double> rate = Rate(since, tenant, count);
  return rate.has_value() ? Short(*rate) : "-";
}

// "appended 1.2k/s", or "appended 52k in all".
std::string Total(const Look& look, const Since& since, TenantCount count) {
  double total = 0;
  for (const v1::TenantStats& tenant : look.stats.tenants()) {
    total += since.look == nullptr ? static_cast<double>((tenant.*count)())
                                   : Rate(since, tenant, count).value_or(0);
  }
  return Short(total) + (since.look == nullptr ? "" : "/s");
}

// As many of the parts as fit, the first ones first.
std::string Joined(std::initializer_list<std::string> parts, std::size_t columns) {
  std::string line;
  for (const std::string& part : parts) {
    if (part.empty()) continue;
    const std::string longer = line.empty() ? part : Concat(line, "   ", part);
    if (columns != 0 && !line.empty() && longer.size() > columns) break;
    line = longer;
  }
  return columns == 0 ? line : Cut(line, columns);
}

std::string MemoryLine(const std::string& name, std::uint64_t used, std::uint64_t limit,
                       std::size_t columns, bool colours) {
  constexpr double kMuch = 0.75;
  constexpr double kFull = 0.9;
  constexpr int kBarColumns = 30;
  const double share = limit == 0 ? 0 : static_cast<double>(used) / static_cast<double>(limit);
  std::string title = name;
  title.resize(std::max<std::size_t>(title.size(), 8), ' ');
  std::string percent = Concat(Fixed(100 * share, 0), " %");
  percent.insert(0, percent.size() < 5 ? 5 - percent.size() : 0, ' ');
  const std::string figures =
      Concat(" ", percent, "  ", FormatBytes(used), " of ", FormatBytes(limit));
  int bar = kBarColumns;
  if (columns != 0) {
    const auto rest = static_cast<int>(columns) - static_cast<int>(title.size() + figures.size());
    bar = std::min(bar, rest - 2);
  }
  if (bar < 4) return Cut(title + figures, columns);
  const Style style = share > kFull ? Style::kRed : share > kMuch ? Style::kYellow : Style::kGreen;
  return Concat(title, Styled(Bar(share, bar), style, colours), figures);
}

// "2+13": running and queued jobs of a priority.
std::string Jobs(const v1::CompactionStats& stats, int priority) {
  if (priority >= stats.jobs_queued_size() || priority >= stats.jobs_running_size()) return "-";
  return Concat(stats.jobs_running(priority), "+", stats.jobs_queued(priority));
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
    if (run.summary() == v1::BLOCK_SUMMARY_SIGNS) Append(text, " signs");
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

using TokensById = std::map<std::uint64_t, std::uint64_t>;

TokensById TokensOf(const Look* look) {
  TokensById tokens;
  if (look == nullptr) return tokens;
  for (const v1::SequenceInfo& sequence : look->sequences.sequences()) {
    tokens[sequence.sequence_id()] = sequence.tokens();
  }
  return tokens;
}

// Tokens per second; 0 for a sequence that is new, or was truncated.
double RateOf(const v1::SequenceInfo& sequence, const TokensById& before, double seconds) {
  const auto then = before.find(sequence.sequence_id());
  if (seconds <= 0 || then == before.end() || sequence.tokens() < then->second) return 0;
  return static_cast<double>(sequence.tokens() - then->second) / seconds;
}

}  // namespace

std::vector<std::string> HeadLines(const Look& look, const Since& since, std::size_t columns,
                                   bool colours) {
  const v1::StatsResponse& stats = look.stats;
  const v1::CompactionStats& work = stats.compaction();
  std::vector<std::string> lines;
  const std::string name = Concat("tesserad ", stats.version());
  const std::string draining = stats.draining() ? "DRAINING" : "";
  lines.push_back(Joined(
      {name, draining, Concat("device ", stats.device()),
       Concat("up ", Age(stats.uptime_seconds())), Concat("kernels ", stats.implementation())},
      columns));
  if (colours) {
    const std::size_t at = lines[0].find(draining);
    if (!draining.empty() && at != std::string::npos) {
      lines[0].replace(at, draining.size(), Styled(draining, Style::kYellow, colours));
    }
    lines[0].replace(0, std::min(name.size(), lines[0].size()),
                     Styled(lines[0].substr(0, name.size()), Style::kBold, colours));
  }
  if (!stats.device_uuid().empty()) {
    lines.push_back(Joined({Concat("uuid ", stats.device_uuid()), stats.device_model()}, columns));
  }
  lines.push_back(MemoryLine("memory", stats.pool_reserved_bytes(), stats.pool_limit_bytes(),
                             columns, colours));
  if (stats.host_tier_limit_bytes() != 0) {
    lines.push_back(MemoryLine("host", stats.host_tier_bytes(), stats.host_tier_limit_bytes(),
                               columns, colours));
  }
  lines.push_back(
      Joined({Concat("sessions ", stats.sessions()), Concat("sequences ", look.sequences.total()),
              Concat("appended ", Total(look, since, &v1::TenantStats::tokens_appended)),
              Concat("absorbed ", Total(look, since, &v1::TenantStats::tail_tokens_absorbed)),
              Concat("attends ", Total(look, since, &v1::TenantStats::attend_requests))},
             columns));
  lines.push_back(Joined({Concat("jobs running+queued: tails ", Jobs(work, 0), ", seals ",
                                 Jobs(work, 1), ", pressure ", Jobs(work, 2)),
                          Concat("sealed ", Short(static_cast<double>(work.segments_sealed()))),
                          Concat("raw copies ", FormatBytes(work.raw_copy_bytes()), " of ",
                                 FormatBytes(work.raw_copy_limit_bytes())),
                          Concat("tiles ", Short(static_cast<double>(work.tiles_encoded())))},
                         columns));
  return lines;
}

Table TenantTable(const Look& look, const Since& since) {
  const bool rates = since.look != nullptr;
  const auto column = [](const char* title, std::uint8_t leave_out) {
    return Table::Column{.title = title, .leave_out = leave_out};
  };
  Table table({{.title = "tenant", .align = Align::kLeft, .least = 8},
               column("used", 0),
               column("limit", 3),
               column("tiles", 4),
               column("tails", 6),
               column("extents", 8),
               column("sessions", 2),
               column("sequences", 0),
               column("decoding", 0),
               column(rates ? "appended/s" : "appended", 0),
               column(rates ? "absorbed/s" : "absorbed", 7),
               column(rates ? "attends/s" : "attends", 9),
               column("offloaded", 1),
               column("retired", 10),
               column("revoked", 11),
               column("ring waits", 12)});
  for (const v1::TenantStats& tenant : look.stats.tenants()) {
    const auto tagged = [&](const char* tag) {
      const auto it = tenant.used_bytes_by_tag().find(tag);
      return FormatBytes(it == tenant.used_bytes_by_tag().end() ? 0 : it->second);
    };
    table.Add({tenant.name(), FormatBytes(tenant.used_bytes()),
               tenant.hard_limit_bytes() == 0 ? "-" : FormatBytes(tenant.hard_limit_bytes()),
               tagged("tiles"), tagged("tails"),
               Concat(tenant.pool_extents(), " x ", FormatBytes(tenant.pool_extent_bytes())),
               Short(tenant.sessions()), Short(tenant.sequences()),
               Short(tenant.decoding_sequences()),
               Counted(since, tenant, &v1::TenantStats::tokens_appended),
               Counted(since, tenant, &v1::TenantStats::tail_tokens_absorbed),
               Counted(since, tenant, &v1::TenantStats::attend_requests),
               FormatBytes(tenant.offloaded_bytes()), FormatBytes(tenant.retired_bytes()),
               Short(static_cast<double>(tenant.pins_revoked())),
               Short(static_cast<double>(tenant.tail_full_waits()))});
  }
  return table;
}

Table SessionTable(const Look& look) {
  Table table({{.title = "session", .align = Align::kLeft},
               {.title = "tenant", .align = Align::kLeft, .leave_out = 2, .least = 8},
               {.title = "worker", .align = Align::kLeft, .least = 8},
               {.title = "age"},
               {.title = "transport", .align = Align::kLeft, .leave_out = 3},
               {.title = "sequences"},
               {.title = "decoding", .leave_out = 1},
               {.title = "pins", .leave_out = 4}});
  for (const v1::SessionInfo& session : look.sessions.sessions()) {
    table.Add({ShortId(kSessionLetter, session.session_id()), session.tenant(),
               session.worker_name().empty() ? "-" : session.worker_name(),
               Age(session.age_seconds()), session.mapped() ? "mapped" : "rpc",
               Concat(session.sequences()), Concat(session.decoding_sequences()),
               Concat(session.pinned_slots())});
  }
  return table;
}

Table SequenceTable(const Look& look, const Since& since, SequenceOrder order) {
  std::vector<Table::Column> columns = {
      {.title = "sequence", .align = Align::kLeft},
      {.title = "tenant", .align = Align::kLeft, .leave_out = 4, .least = 7},
      {.title = "model", .align = Align::kLeft, .leave_out = 5, .least = 8},
      {.title = "policy", .align = Align::kLeft, .leave_out = 1, .least = 12},
      {.title = "tokens"},
      {.title = "tokens/s"},
      {.title = "tiles"},
      {.title = "format", .align = Align::kLeft, .leave_out = 3, .least = 11},
      {.title = "state", .align = Align::kLeft}};
  const auto rate_column = columns.begin() + 5;
  if (since.look == nullptr) columns.erase(rate_column);
  Table table(columns);
  const TokensById before = TokensOf(since.look);
  const auto& sequences = look.sequences.sequences();
  std::vector<int> sorted(static_cast<std::size_t>(sequences.size()));
  std::iota(sorted.begin(), sorted.end(), 0);  // the daemon's order: newest first
  std::ranges::stable_sort(sorted, std::greater<>(), [&](int i) {
    switch (order) {
      case SequenceOrder::kNewest:
        break;
      case SequenceOrder::kRate:
        return RateOf(sequences[i], before, since.seconds);
      case SequenceOrder::kTokens:
        return static_cast<double>(sequences[i].tokens());
      case SequenceOrder::kBytes:
        return static_cast<double>(sequences[i].tile_bytes());
    }
    return 0.0;
  });
  for (const int i : sorted) {
    const v1::SequenceInfo& sequence = sequences[i];
    std::vector<std::string> cells = {ShortId(kSequenceLetter, sequence.sequence_id()),
                                      sequence.tenant(),
                                      sequence.model(),
                                      sequence.policy(),
                                      Concat(sequence.tokens()),
                                      Short(RateOf(sequence, before, since.seconds)),
                                      FormatBytes(sequence.tile_bytes()),
                                      FormOf(sequence),
                                      StateOf(sequence)};
    if (since.look == nullptr) cells.erase(cells.begin() + 5);
    table.Add(std::move(cells));
  }
  return table;
}

}  // namespace tessera::cli
