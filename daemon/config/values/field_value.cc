#include "daemon/config/values/field_value.h"

#include <charconv>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/config/values/duration.h"

namespace tessera::config {

namespace {

using google::protobuf::FieldDescriptor;

absl::StatusOr<std::uint64_t> ParseWhole(std::string_view text) {
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  const bool is_number = !text.empty() && parsed.ptr == end;
  if (is_number && parsed.ec == std::errc()) return number;
  if (is_number && parsed.ec == std::errc::result_out_of_range) {
    return absl::InvalidArgumentError(
        Concat(text, " is above the limit of ", std::numeric_limits<std::uint64_t>::max()));
  }
  return absl::InvalidArgumentError(Concat(Quoted(text), " is not a whole number"));
}

absl::StatusOr<std::uint64_t> ParseNumber(const FieldDescriptor* field, std::string_view text) {
  const std::string_view name = AsStringView(field->name());
  if (name.ends_with("_bytes")) return ParseBytes(text);
  if (name.ends_with("_ms")) return ParseMilliseconds(text);
  return ParseWhole(text);
}

}  // namespace

absl::Status SetFromText(const FieldDescriptor* field, std::string_view text,
                         google::protobuf::Message& out) {
  const google::protobuf::Reflection* const reflection = out.GetReflection();
  const FieldDescriptor::CppType type = field->cpp_type();
  if (type == FieldDescriptor::CPPTYPE_STRING) {
    if (field->is_repeated()) {
      reflection->AddString(&out, field, std::string(text));
    } else {
      reflection->SetString(&out, field, std::string(text));
    }
    return absl::OkStatus();
  }
  if (type == FieldDescriptor::CPPTYPE_BOOL) {
    if (text != "true" && text != "false") {
      return absl::InvalidArgumentError(Concat(Quoted(text), " is not true or false"));
    }
    reflection->SetBool(&out, field, text == "true");
    return absl::OkStatus();
  }
  const absl::StatusOr<std::uint64_t> number = ParseNumber(field, text);
  if (!number.ok()) return number.status();
  if (type == FieldDescriptor::CPPTYPE_UINT64) {
    reflection->SetUInt64(&out, field, *number);
    return absl::OkStatus();
  }
  TESSERA_CHECK(type == FieldDescriptor::CPPTYPE_UINT32, field->full_name());
  constexpr std::uint32_t kMax = std::numeric_limits<std::uint32_t>::max();
  if (*number > kMax) {
    return absl::InvalidArgumentError(Concat(*number, " is above the limit of ", kMax));
  }
  reflection->SetUInt32(&out, field, static_cast<std::uint32_t>(*number));
  return absl::OkStatus();
}

}  // namespace tessera::config
