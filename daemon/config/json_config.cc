#include "daemon/config/json_config.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"
#include "daemon/config/values/field_value.h"

namespace tessera::config {

namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using Kind = JsonToken::Kind;

std::string ListOf(const Descriptor* descriptor) {
  std::string names;
  for (int i = 0; i < descriptor->field_count(); ++i) {
    Append(names, i == 0 ? "" : ", ", descriptor->field(i)->name());
  }
  return names;
}

// Walks the text and the message's description together, so it descends no deeper than the message.
class Reader {
 public:
  Reader(std::string_view json, FieldPlaces& places)
      : json_(json), scanner_(json), places_(places) {}

  absl::Status ReadFile(Message& out) {
    absl::StatusOr<JsonToken> token = scanner_.Next();
    if (!token.ok()) return token.status();
    if (absl::Status status = ReadObject(*token, "", out); !status.ok()) return status;
    token = scanner_.Next();
    if (!token.ok()) return token.status();
    if (token->kind == Kind::kEnd) return absl::OkStatus();
    return scanner_.ErrorAt(token->offset,
                            Concat("expected the end of the file, found ", token->ToString()));
  }

 private:
  absl::Status Refuse(const JsonToken& token, std::string_view path, std::string_view why) const {
    return scanner_.ErrorAt(token.offset, Concat(path, path.empty() ? "" : ": ", why));
  }
  absl::Status Expected(std::string_view what, const JsonToken& found,
                        std::string_view path) const {
    return Refuse(found, path, Concat("expected ", what, ", found ", found.ToString()));
  }

  // Calls `read` with the first token of each element up to the mark `end`; `begin` was taken.
  template <typename ReadElement>
  absl::Status ReadElements(char end, std::string_view path, ReadElement read) {
    for (bool first = true;; first = false) {
      absl::StatusOr<JsonToken> token = scanner_.Next();
      if (!token.ok()) return token.status();
      if (first && token->IsMark(end)) return absl::OkStatus();
      if (token->IsMark(end)) return Refuse(*token, path, "a comma before the end; remove it");
      if (absl::Status status = read(*token); !status.ok()) return status;
      token = scanner_.Next();
      if (!token.ok()) return token.status();
      if (token->IsMark(end)) return absl::OkStatus();
      if (!token->IsMark(',')) return Expected(Concat("',' or '", end, "'"), *token, path);
    }
  }

  absl::Status ReadObject(const JsonToken& begin, const std::string& path, Message& out) {
    if (!begin.IsMark('{')) return Expected("'{'", begin, path);
    return ReadElements('}', path, [&](const JsonToken& name) -> absl::Status {
      if (name.kind != Kind::kString) return Expected("the name of a field", name, path);
      const FieldDescriptor* const field = FindField(out.GetDescriptor(), name.text);
      const std::string prefix = path.empty() ? "" : Concat(path, ".");
      if (field == nullptr) return NoSuchField(name, prefix, out.GetDescriptor());
      const std::string field_path = Concat(prefix, field->name());
      absl::StatusOr<JsonToken> token = scanner_.Next();
      if (!token.ok()) return token.status();
      if (!token->IsMark(':')) return Expected("':'", *token, field_path);
      token = scanner_.Next();
      if (!token.ok()) return token.status();
      if (const std::size_t* before = places_.Add(field_path, token->offset)) {
        return Refuse(
            name, field_path,
            Concat("is given twice; the first is at ", PositionAt(json_, *before).ToString()));
      }
      if (token->kind == Kind::kNull) return absl::OkStatus();
      if (field->is_repeated()) return ReadList(*token, field, field_path, out);
      return ReadValue(*token, field, field_path, out);
    });
  }

  static const FieldDescriptor* FindField(const Descriptor* descriptor, const std::string& name) {
    if (const FieldDescriptor* field = descriptor->FindFieldByName(name)) return field;
    for (int i = 0; i < descriptor->field_count(); ++i) {
      if (descriptor->field(i)->json_name() == name) return descriptor->field(i);
    }
    return nullptr;
  }

  absl::Status NoSuchField(const JsonToken& name, std::string_view prefix,
                           const Descriptor* descriptor) const {
    std::vector<std::string_view> names;
    for (int i = 0; i < descriptor->field_count(); ++i) {
      names.push_back(AsStringView(descriptor->field(i)->name()));
    }
    const std::string guess = DidYouMean(name.text, names);
    return Refuse(name, "",
                  Concat(prefix, Quoted(name.text), " is not a field",
                         guess.empty() ? Concat("; the fields are ", ListOf(descriptor)) : guess));
  }

  absl::Status ReadList(const JsonToken& begin, const FieldDescriptor* field,
                        const std::string& path, Message& out) {
    if (!begin.IsMark('[')) return Expected("'['", begin, path);
    std::size_t count = 0;
    return ReadElements(']', path, [&](const JsonToken& token) -> absl::Status {
      const std::string element = Concat(path, "[", count++, "]");
      if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
        return ReadValue(token, field, element, out);
      }
      return ReadObject(token, element, *out.GetReflection()->AddMessage(&out, field));
    });
  }

  absl::Status ReadValue(const JsonToken& token, const FieldDescriptor* field,
                         const std::string& path, Message& out) const {
    const FieldDescriptor::CppType type = field->cpp_type();
    if (type == FieldDescriptor::CPPTYPE_STRING) {
      if (token.kind != Kind::kString) return Expected("text in quotes", token, path);
    } else if (type == FieldDescriptor::CPPTYPE_BOOL) {
      if (token.kind != Kind::kTrue && token.kind != Kind::kFalse) {
        return Expected("true or false", token, path);
      }
    } else {
      if (token.kind != Kind::kString && token.kind != Kind::kNumber) {
        return Expected("a number", token, path);
      }
      // Such as 8.589934592e+09, which tools make of large numbers; it may have lost digits.
      if (token.kind == Kind::kNumber && token.text.find_first_of("-.eE") != std::string::npos) {
        return Refuse(token, path, Concat(Quoted(token.text), " is not a whole number"));
      }
    }
    const absl::Status status = SetFromText(field, token.text, out);
    return status.ok() ? status : Refuse(token, path, AsStringView(status.message()));
  }

  const std::string_view json_;
  JsonScanner scanner_;
  FieldPlaces& places_;
};

}  // namespace

const std::size_t* FieldPlaces::Add(const std::string& path, std::size_t offset) {
  const auto [found, added] = offsets_.try_emplace(path, offset);
  return added ? nullptr : &found->second;
}

absl::Status FieldPlaces::Locate(const absl::Status& status) const {
  const std::string_view message = AsStringView(status.message());
  const std::string_view path = message.substr(0, message.find_first_of(": "));
  const auto found = offsets_.find(path);
  if (status.ok() || found == offsets_.end()) return status;
  return absl::Status(status.code(),
                      Concat(PositionAt(text_, found->second).ToString(), ": ", message));
}

absl::Status FromJson(std::string_view json, tessera::v1::DaemonConfig* message,
                      FieldPlaces* places) {
  FieldPlaces local(json);
  absl::Status status = Reader(json, local).ReadFile(*message);
  if (places != nullptr) *places = std::move(local);
  return status;
}

}  // namespace tessera::config
