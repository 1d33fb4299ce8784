// Reads JSON files as google.protobuf.Struct, with protobuf's strict parser.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "google/protobuf/struct.pb.h"

namespace tessera::llm {

using Json = google::protobuf::Struct;
using JsonValue = google::protobuf::Value;

// The text must be a JSON object. INVALID_ARGUMENT describes the syntax error.
absl::StatusOr<Json> ParseJson(std::string_view text);
absl::StatusOr<Json> ReadJsonFile(const std::string& path);

// nullptr if `object` has no such member.
const JsonValue* Find(const Json& object, const std::string& key);
// INVALID_ARGUMENT names the member. Counts are whole numbers up to 2^53, the exact range of a
// double.
absl::StatusOr<std::uint64_t> CountOf(const JsonValue& value, std::string_view name);
absl::StatusOr<std::uint64_t> Count(const Json& object, const std::string& key);
absl::StatusOr<double> Number(const Json& object, const std::string& key);

}  // namespace tessera::llm
