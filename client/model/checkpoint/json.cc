#include "client/model/checkpoint/json.h"

#include <google/protobuf/util/json_util.h>

#include <cmath>
#include <fstream>
#include <iterator>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

absl::StatusOr<Json> ParseJson(std::string_view text) {
  Json json;
  const auto status =
      google::protobuf::util::JsonStringToMessage({text.data(), text.size()}, &json, {});
  if (!status.ok()) return absl::InvalidArgumentError(Concat("JSON: ", status.message()));
  return json;
}

absl::StatusOr<Json> ReadJsonFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(Concat("cannot open \"", path, "\""));
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  absl::StatusOr<Json> json = ParseJson(text);
  if (json.ok()) return json;
  return absl::InvalidArgumentError(Concat("\"", path, "\": ", json.status().message()));
}

const JsonValue* Find(const Json& object, const std::string& key) {
  const auto it = object.fields().find(key);
  return it == object.fields().end() ? nullptr : &it->second;
}

absl::StatusOr<std::uint64_t> CountOf(const JsonValue& value, std::string_view name) {
  const double number = value.number_value();
  if (!value.has_number_value() || !(number >= 0 && number <= 0x1p53) ||
      number != std::floor(number)) {
    return absl::InvalidArgumentError(Concat("\"", name, "\" is not a whole number up to 2^53"));
  }
  return static_cast<std::uint64_t>(number);
}

absl::StatusOr<std::uint64_t> Count(const Json& object, const std::string& key) {
  const JsonValue* value = Find(object, key);
  if (value == nullptr) return absl::InvalidArgumentError(Concat("\"", key, "\" is missing"));
  return CountOf(*value, key);
}

absl::StatusOr<double> Number(const Json& object, const std::string& key) {
  const JsonValue* value = Find(object, key);
  if (value == nullptr || !value->has_number_value()) {
    return absl::InvalidArgumentError(Concat("\"", key, "\" is missing or not a number"));
  }
  return value->number_value();
}

}  // namespace tessera::llm
