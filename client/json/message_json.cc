#include "client/json/message_json.h"

#include <google/protobuf/descriptor.h>

#include <cctype>
#include <cmath>
#include <map>
#include <string_view>

#include "client/json/json_text.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// "SEQUENCE_STATE_LIVE" is "live": what all names of the enumeration begin with is left out.
std::string WordOf(const EnumValueDescriptor& value) {
  const google::protobuf::EnumDescriptor& type = *value.type();
  std::string_view shared = value.name();
  for (int i = 0; i < type.value_count(); ++i) {
    const std::string& other = type.value(i)->name();
    std::size_t alike = 0;
    while (alike < shared.size() && alike < other.size() && shared[alike] == other[alike]) ++alike;
    shared = shared.substr(0, alike);
  }
  const std::size_t end = shared.rfind('_');  // npos + 1 is 0
  std::string word;
  for (const char c : std::string_view(value.name()).substr(end + 1)) {
    word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return word;
}

std::string Number(double value) { return std::isfinite(value) ? Concat(value) : "null"; }

// `index`: of the element of a repeated field; -1: the field is single.
std::string ValueOf(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& read = *message.GetReflection();
  const bool many = index >= 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL: {
      const bool value =
          many ? read.GetRepeatedBool(message, &field, index) : read.GetBool(message, &field);
      return value ? "true" : "false";
    }
    case FieldDescriptor::CPPTYPE_UINT32:
      return Concat(many ? read.GetRepeatedUInt32(message, &field, index)
                         : read.GetUInt32(message, &field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return Concat(many ? read.GetRepeatedUInt64(message, &field, index)
                         : read.GetUInt64(message, &field));
    case FieldDescriptor::CPPTYPE_INT32:
      return Concat(many ? read.GetRepeatedInt32(message, &field, index)
                         : read.GetInt32(message, &field));
    case FieldDescriptor::CPPTYPE_INT64:
      return Concat(many ? read.GetRepeatedInt64(message, &field, index)
                         : read.GetInt64(message, &field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Number(many ? read.GetRepeatedFloat(message, &field, index)
                         : read.GetFloat(message, &field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return Number(many ? read.GetRepeatedDouble(message, &field, index)
                         : read.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_ENUM:
      return JsonString(WordOf(
          *(many ? read.GetRepeatedEnum(message, &field, index) : read.GetEnum(message, &field))));
    case FieldDescriptor::CPPTYPE_STRING:
      return JsonString(many ? read.GetRepeatedString(message, &field, index)
                             : read.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      if (!many && !read.HasField(message, &field)) return "null";
      return JsonOf(many ? read.GetRepeatedMessage(message, &field, index)
                         : read.GetMessage(message, &field));
  }
  CheckFailed(__FILE__, __LINE__, "a field of a known type", field.name());
}

// An object whose keys are in order.
std::string MapOf(const Message& message, const FieldDescriptor& field) {
  const Reflection& read = *message.GetReflection();
  std::map<std::string, std::string> entries;
  for (int i = 0; i < read.FieldSize(message, &field); ++i) {
    const Message& entry = read.GetRepeatedMessage(message, &field, i);
    std::string key = ValueOf(entry, *field.message_type()->map_key(), -1);
    if (!key.starts_with('"')) key = JsonString(key);
    entries[key] = ValueOf(entry, *field.message_type()->map_value(), -1);
  }
  std::string out = "{";
  for (const auto& [key, value] : entries) {
    Append(out, out.size() == 1 ? "" : ",", key, ":", value);
  }
  return out + "}";
}

std::string FieldOf(const Message& message, const FieldDescriptor& field) {
  if (field.is_map()) return MapOf(message, field);
  if (!field.is_repeated()) return ValueOf(message, field, -1);
  std::string out = "[";
  for (int i = 0; i < message.GetReflection()->FieldSize(message, &field); ++i) {
    Append(out, i == 0 ? "" : ",", ValueOf(message, field, i));
  }
  return out + "]";
}

// The short form of an object's own id, as commands take it. JSON readers that keep numbers as
// doubles round ids of tenants above the 31st.
std::string ShortIdOf(const Message& message) {
  const FieldDescriptor& first = *message.GetDescriptor()->field(0);
  char letter = 0;
  if (first.name() == "sequence_id") letter = kSequenceLetter;
  if (first.name() == "prefix_id") letter = kPrefixLetter;
  if (first.name() == "session_id") letter = kSessionLetter;
  if (letter == 0 || first.cpp_type() != FieldDescriptor::CPPTYPE_UINT64) return "";
  const std::uint64_t id = message.GetReflection()->GetUInt64(message, &first);
  return Concat("\"id\":", JsonString(ShortId(letter, id)));
}

}  // namespace

std::string JsonOf(const Message& message) {
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  std::string out = "{";
  if (type.field_count() > 0) out += ShortIdOf(message);
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    Append(out, out.size() == 1 ? "" : ",", JsonString(field.name()), ":", FieldOf(message, field));
  }
  return out + "}";
}

}  // namespace tessera::client
