// tessera evict, drain: frees memory, shuts a daemon down.

#include <optional>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/tools/admin.h"
#include "client/tools/connection.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "client/tools/short_id.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

constexpr char kLetters[] = {kSequenceLetter, kPrefixLetter};

absl::Status Evict(const Flags& flags) {
  // All ids are checked before the first one is freed.
  std::vector<std::uint64_t> ids;
  for (const std::string& text : flags.positional()) {
    const std::optional<std::uint64_t> id = ParseId(text, {kLetters, 2});
    if (!id.has_value()) {
      return absl::InvalidArgumentError(
          Concat(Quoted(text), " is not a sequence or prefix, as in s51 or p52"));
    }
    ids.push_back(*id);
  }
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::string& text = flags.positional()[i];
    absl::Status status = admin->Evict(ids[i]);
    if (absl::IsNotFound(status)) {
      return absl::NotFoundError(
          Concat("no sequence or prefix ", text,
                 "; 'tessera status' lists sequences, 'tessera prefixes' prefixes"));
    }
    if (status.ok()) status = Print(Concat("freed ", text, "\n"));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Reload(const Flags& flags) {
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::ReloadResponse> reloaded = admin->Reload();
  if (!reloaded.ok()) return reloaded.status();
  std::string applied;
  for (const std::string& field : reloaded->applied()) Append(applied, " ", field);
  std::string waiting;
  for (const std::string& field : reloaded->needs_restart()) Append(waiting, " ", field);
  return Print(Concat("applied:", applied.empty() ? " nothing" : applied, "\n",
                      "needs a restart:", waiting.empty() ? " nothing" : waiting, "\n"));
}

absl::Status Drain(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> limit = flags.Number("limit-ms", 0, 3'600'000);
  if (!limit.ok()) return limit.status();
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::DrainResponse> drain = admin->Drain(*limit);
  if (!drain.ok()) return drain.status();
  return Print(Concat("draining; ", drain->sessions(), " sessions still attached\n"));
}

}  // namespace

CommandSpec EvictSpec() {
  return {.name = "evict",
          .summary = "free sequences or published prefixes",
          .description =
              "Frees sequences or published prefixes of any tenant. Workers that still use an\n"
              "evicted sequence get NOT_FOUND. An evicted prefix is no longer matched.\n",
          .arguments = {{.name = "ID",
                         .hint = "'tessera status' lists sequences, 'tessera prefixes' prefixes",
                         .repeats = true}},
          .examples = {"tessera evict s51 p52"}};
}

CommandSpec ReloadSpec() {
  return {.name = "reload",
          .summary = "apply a changed configuration without a restart",
          .description =
              "Makes a daemon read its configuration anew. It checks everything, then applies the\n"
              "fields that need no restart, all or nothing. SIGHUP does the same.\n",
          .examples = {"tessera reload"}};
}

CommandSpec DrainSpec() {
  return {
      .name = "drain",
      .summary = "refuse new sessions, and exit when the current ones end",
      .description =
          "Drains a daemon: it refuses new sessions, notifies its workers, and exits when the\n"
          "last session has ended or the limit has passed.\n",
      .examples = {"tessera drain --limit-ms=30000"},
      .flags = {{"limit-ms", "MS", "Exit after this time at the latest. 0: as configured.", "0"}}};
}

int RunEvict(std::span<const std::string_view> args) {
  return RunCommand(EvictSpec(), args, Evict);
}
int RunReload(std::span<const std::string_view> args) {
  return RunCommand(ReloadSpec(), args, Reload);
}
int RunDrain(std::span<const std::string_view> args) {
  return RunCommand(DrainSpec(), args, Drain);
}

}  // namespace tessera::cli
