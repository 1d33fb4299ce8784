// The state of a daemon, and its tables for `status` and `top`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/tools/admin.h"
#include "client/tools/table.h"

namespace tessera::cli {

// The state of a daemon at one moment.
struct Look {
  v1::StatsResponse stats;
  v1::ListSessionsResponse sessions;
  v1::ListSequencesResponse sequences;
};
absl::StatusOr<Look> ReadDaemonState(Admin& admin, std::uint32_t sequence_limit);

// An earlier state, from which counters become rates.
struct Since {
  const Look* look = nullptr;  // null: counters are shown as they are
  double seconds = 0;
};

enum class SequenceOrder : std::uint8_t { kNewest, kRate, kTokens, kBytes };

// Lines above the tables: the daemon, a bar of each memory, totals and background work.
std::vector<std::string> HeadLines(const Look& look, const Since& since, std::size_t columns,
                                   bool colours);

Table TenantTable(const Look& look, const Since& since);
Table SessionTable(const Look& look);
Table SequenceTable(const Look& look, const Since& since, SequenceOrder order);

}  // namespace tessera::cli
