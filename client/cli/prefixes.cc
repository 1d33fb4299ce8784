// tessera prefixes: lists published prefixes.

#include <string>

#include "client/cli/command.h"
#include "client/json/message_json.h"
#include "client/tools/admin.h"
#include "client/tools/connection.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "client/tools/short_id.h"
#include "client/tools/table.h"
#include "client/tools/terminal.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

std::string LeftOf(const v1::PrefixInfo& prefix) {
  if (prefix.pinned()) return "pinned";
  if (prefix.ttl_seconds() == 0) return "no limit";
  if (prefix.references() > 0) return "in use";
  return Age(prefix.ttl_seconds() > prefix.idle_seconds()
                 ? prefix.ttl_seconds() - prefix.idle_seconds()
                 : 0);
}

// Where its tiles are: a fork brings back those in the host tier.
std::string PlaceOf(const v1::PrefixInfo& prefix) {
  if (prefix.offloaded_bytes() == 0) return "pool";
  return prefix.tile_bytes() == 0 ? "host" : "both";
}

std::string Render(const v1::ListPrefixesResponse& list, std::size_t columns) {
  Table table({{.title = "prefix", .align = Align::kLeft},
               {.title = "tenant", .align = Align::kLeft, .least = 7},
               {.title = "model", .align = Align::kLeft, .leave_out = 3, .least = 8},
               {.title = "policy", .align = Align::kLeft, .leave_out = 2, .least = 12},
               {.title = "rank", .leave_out = 7},
               {.title = "tokens"},
               {.title = "tiles"},
               {.title = "place", .align = Align::kLeft, .leave_out = 1},
               {.title = "shared", .leave_out = 5},
               {.title = "forks", .leave_out = 1},
               {.title = "age", .leave_out = 6},
               {.title = "idle", .leave_out = 4},
               {.title = "time left"}});
  for (const v1::PrefixInfo& prefix : list.prefixes()) {
    table.Add({ShortId(kPrefixLetter, prefix.prefix_id()), prefix.tenant(), prefix.model(),
               prefix.policy(),
               prefix.group_size() > 1 ? Concat(prefix.rank(), " of ", prefix.group_size()) : "-",
               Concat(prefix.tokens()), FormatBytes(prefix.tile_bytes() + prefix.offloaded_bytes()),
               PlaceOf(prefix), FormatBytes(prefix.shared_tile_bytes()),
               Concat(prefix.references()), Age(prefix.age_seconds()), Age(prefix.idle_seconds()),
               LeftOf(prefix)});
  }
  if (table.empty()) return "no prefixes\n";
  const auto shown = static_cast<std::uint64_t>(list.prefixes_size());
  std::string text = table.Render(0, columns);
  if (list.total() > shown) Append(text, "... and ", list.total() - shown, " more\n");
  return text;
}

absl::Status Prefixes(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> limit = flags.Number("limit", 1, 1'000'000);
  if (!limit.ok()) return limit.status();
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::ListPrefixesResponse> list =
      admin->Prefixes(static_cast<std::uint32_t>(*limit));
  if (!list.ok()) return list.status();
  if (flags.Has("json")) return Print(client::JsonOf(*list) + "\n");
  return Print(Render(*list, flags.Has("wide") ? 0 : OutputColumns()));
}

}  // namespace

CommandSpec PrefixesSpec() {
  return {
      .name = "prefixes",
      .summary = "list published prefixes",
      .description =
          "Lists published prefixes, for each tenant the least recently used first. Those whose\n"
          "place is the host tier are matched there, and a fork brings them back.\n"
          "'tessera evict PREFIX' frees one.\n",
      .examples = {"tessera prefixes --limit=20"},
      .flags = {{"limit", "N", "Prefixes to list of each tenant.", "1000"},
                {"wide", "", "Show all columns, whatever the width of the terminal.", ""},
                {"json", "", "Print one JSON object instead of a table.", ""}}};
}

int RunPrefixes(std::span<const std::string_view> args) {
  return RunCommand(PrefixesSpec(), args, Prefixes);
}

}  // namespace tessera::cli
