// tessera prefixes: lists published prefixes.

#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <string>

#include "client/cli/command.h"
#include "client/tools/admin.h"
#include "client/tools/connection.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
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

std::string Render(const v1::ListPrefixesResponse& list) {
  Table table({{"prefix"},
               {"tenant", Align::kLeft},
               {"model", Align::kLeft},
               {"policy", Align::kLeft},
               {"rank"},
               {"tokens"},
               {"tiles"},
               {"shared"},
               {"forks"},
               {"age"},
               {"idle"},
               {"time left"}});
  for (const v1::PrefixInfo& prefix : list.prefixes()) {
    table.Add({Concat(prefix.prefix_id()), prefix.tenant(), prefix.model(), prefix.policy(),
               prefix.group_size() > 1 ? Concat(prefix.rank(), " of ", prefix.group_size()) : "-",
               Concat(prefix.tokens()), FormatBytes(prefix.tile_bytes()),
               FormatBytes(prefix.shared_tile_bytes()), Concat(prefix.references()),
               Age(prefix.age_seconds()), Age(prefix.idle_seconds()), LeftOf(prefix)});
  }
  if (table.empty()) return "no prefixes\n";
  const auto shown = static_cast<std::uint64_t>(list.prefixes_size());
  std::string text = table.Render();
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
  std::string text = Render(*list);
  if (flags.Has("json")) {
    text.clear();
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    if (!google::protobuf::util::MessageToJsonString(*list, &text, options).ok()) {
      return absl::InternalError("the response cannot be converted to JSON");
    }
    text += "\n";
  }
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

int RunPrefixes(std::span<const std::string_view> args) {
  return RunWithFlags(
      Flags("Usage: tessera prefixes [--json] [--limit=N] [--address=ADDRESS]\n\n"
            "Lists published prefixes, for each tenant the least recently used first.\n"
            "'tessera evict PREFIX' frees one.\n\n"
            "Example:\n"
            "  tessera prefixes --limit=20",
            WithConnection({{"json", "", "Print one JSON object instead of a table.", ""},
                            {"limit", "N", "Prefixes to list of each tenant.", "1000"}})),
      args, Prefixes);
}

}  // namespace tessera::cli
