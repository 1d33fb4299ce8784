// JSON files, as google.protobuf.Struct, which protobuf reads strictly.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "google/protobuf/struct.pb.h"

namespace tessera::llm {

using Json = google::protobuf::Struct;
using JsonValue = google::protobuf::Value;

// INVALID_ARGUMENT says what is wrong; the text must be an object.
absl::StatusOr<Json> ParseJson(std::string_view text);
absl::StatusOr<Json> ReadJsonFile(const std::string& path);

// Null where `object` has no such member.
const JsonValue* Find(const Json& object, const std::string& key);
// INVALID_ARGUMENT names the member. Counts are whole numbers up to 2^53, which a double holds.
absl::StatusOr<std::uint64_t> CountOf(const JsonValue& value, std::string_view name);
absl::StatusOr<std::uint64_t> Count(const Json& object, const std::string& key);
absl::StatusOr<double> Number(const Json& object, const std::string& key);

}  // namespace tessera::llm
