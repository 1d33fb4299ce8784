#include "client/bench/earlier_run.h"

#include "client/model/checkpoint/json.h"
#include "daemon/base/strings.h"

namespace tessera::cli::bench {

absl::StatusOr<EarlierRun> ReadEarlierRun(const std::string& path, std::string_view benchmark) {
  const absl::StatusOr<llm::Json> json = llm::ReadJsonFile(path);
  if (!json.ok()) {
    return absl::Status(json.status().code(),
                        Concat("--baseline: ", AsStringView(json.status().message())));
  }
  const auto text = [&](const char* key) -> std::string {
    const llm::JsonValue* const value = llm::Find(*json, key);
    return value == nullptr ? "" : value->string_value();
  };
  const llm::JsonValue* const rows = llm::Find(*json, "rows");
  if (rows == nullptr || !rows->has_list_value() || text("name").empty()) {
    return absl::InvalidArgumentError(Concat("--baseline: \"", path,
                                             "\" is not a run; write one with `tessera bench ",
                                             benchmark, " --json > FILE`"));
  }
  if (text("name") != benchmark) {
    return absl::InvalidArgumentError(
        Concat("--baseline: \"", path, "\" is a run of ", text("name"), ", not of ", benchmark));
  }
  EarlierRun run{.source = path, .machine = text("machine"), .values = {}};
  for (const llm::JsonValue& row : rows->list_value().values()) {
    const auto& fields = row.struct_value().fields();
    const auto name = fields.find("name");
    const auto value = fields.find("value");
    // A row that was refused has no value.
    if (name == fields.end() || value == fields.end() || !value->second.has_number_value()) {
      continue;
    }
    run.values[name->second.string_value()] = value->second.number_value();
  }
  return run;
}

}  // namespace tessera::cli::bench
