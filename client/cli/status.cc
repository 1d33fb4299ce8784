// tessera status: the state of a daemon, once.

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/cli/daemons.h"
#include "client/cli/state.h"
#include "client/json/message_json.h"
#include "client/tools/connection.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "client/tools/terminal.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

std::string Text(const Look& look, std::uint64_t rows, std::size_t columns) {
  std::string text;
  for (const std::string& line : HeadLines(look, {}, columns, OutputHasColours())) {
    Append(text, line, "\n");
  }
  Append(text, "\n", TenantTable(look, {}).Render(0, columns), "\n");
  const Table sessions = SessionTable(look);
  Append(text, sessions.empty() ? "no sessions\n" : sessions.Render(0, columns), "\n");
  Look shown = look;
  auto& sequences = *shown.sequences.mutable_sequences();
  if (sequences.size() > static_cast<int>(rows)) {
    sequences.DeleteSubrange(static_cast<int>(rows), sequences.size() - static_cast<int>(rows));
  }
  const Table table = SequenceTable(shown, {}, SequenceOrder::kNewest);
  if (!table.empty()) text += table.Render(0, columns);
  if (look.sequences.total() == 0) text += "no sequences\n";
  const std::uint64_t more = look.sequences.total() - static_cast<std::uint64_t>(sequences.size());
  if (more != 0) Append(text, "... and ", more, " more (--sequences)\n");
  return text;
}

std::string Json(const Look& look) {
  return Concat("{\"stats\":", client::JsonOf(look.stats),
                ",\"sessions\":", client::JsonOf(look.sessions),
                ",\"sequences\":", client::JsonOf(look.sequences), "}\n");
}

absl::Status StatusOfAll(const Flags& flags) {
  const absl::StatusOr<std::vector<DaemonLook>> daemons =
      ReadDaemons(ConnectionOf(flags), std::chrono::seconds(5));
  if (!daemons.ok()) return daemons.status();
  if (flags.Has("json")) return Print(DaemonsJson(*daemons));
  return Print(DaemonsText(*daemons, flags.Has("wide") ? 0 : OutputColumns()));
}

absl::Status Status(const Flags& flags) {
  if (flags.Has("all")) return StatusOfAll(flags);
  const absl::StatusOr<std::uint64_t> rows = flags.Number("sequences", 0, 100000);
  if (!rows.ok()) return rows.status();
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const auto limit = static_cast<std::uint32_t>(std::max<std::uint64_t>(*rows, 1));
  const absl::StatusOr<Look> look = ReadDaemonState(*admin, limit);
  if (!look.ok()) return look.status();
  if (flags.Has("json")) return Print(Json(*look));
  return Print(Text(*look, *rows, flags.Has("wide") ? 0 : OutputColumns()));
}

}  // namespace

CommandSpec StatusSpec() {
  return {
      .name = "status",
      .summary = "show the memory, tenants, sessions and sequences of a daemon",
      .description =
          "Shows the memory, tenants, sessions and sequences of a daemon. On a terminal, tables\n"
          "fit its width: less important columns are left out. With --all, shows one line for\n"
          "each daemon that listens in the directory of --address.\n",
      .examples = {"tessera status --sequences=50",
                   "tessera status --json | jq '.sequences.sequences[].tokens'",
                   "tessera status --address=unix:/run/tessera/ --all"},
      .flags = {{"all", "", "Show all daemons of a directory, one line each.", ""},
                {"sequences", "N", "Sequences to list, the newest ones.", "20"},
                {"wide", "", "Show all columns, whatever the width of the terminal.", ""},
                {"json", "", "Print one JSON object instead of tables.", ""}}};
}

int RunStatus(std::span<const std::string_view> args) {
  return RunCommand(StatusSpec(), args, Status);
}

}  // namespace tessera::cli
