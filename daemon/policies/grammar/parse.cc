#include "daemon/policies/grammar/parse.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"
#include "daemon/policies/grammar/validate.h"
#include "daemon/policies/registry.h"

namespace tessera::policies {
namespace {

// A part of the policy text, trimmed.
struct Piece {
  std::string_view text;
  std::size_t at = 1;  // position of its first character in the policy text, from 1

  // The trimmed sub-range of `length` characters from `first` on.
  Piece Part(std::size_t first, std::size_t length = std::string_view::npos) const {
    const std::string_view part = text.substr(first, length);
    const std::string_view trimmed = Trim(part);
    const std::size_t blanks =
        trimmed.empty() ? 0 : static_cast<std::size_t>(trimmed.data() - part.data());
    return {trimmed, at + first + blanks};
  }
};

std::vector<Piece> Split(const Piece& piece, char separator) {
  std::vector<Piece> pieces;
  for (std::size_t first = 0;;) {
    const std::size_t end = piece.text.find(separator, first);
    pieces.push_back(piece.Part(first, end - first));  // npos - first also means "to the end"
    if (end == std::string_view::npos) return pieces;
    first = end + 1;
  }
}

template <typename... Parts>
absl::Status Refuse(const Piece& piece, const Parts&... why) {
  return absl::InvalidArgumentError(Concat("policy, character ", piece.at, ": ", why...));
}

// Only printable ASCII is allowed, so that error messages can quote any part.
absl::Status CheckCharacters(const Piece& whole) {
  for (std::size_t i = 0; i < whole.text.size(); ++i) {
    const char c = whole.text[i];
    if (c >= ' ' && c <= '~') continue;
    return Refuse({{}, whole.at + i}, "byte ", static_cast<int>(static_cast<unsigned char>(c)),
                  " is not printable ASCII");
  }
  return absl::OkStatus();
}

absl::StatusOr<const TermKind*> KindNamed(const Piece& name) {
  if (name.text.empty()) return Refuse(name, "a term is missing");
  if (const TermKind* kind = FindTermKind(name.text); kind != nullptr) return kind;
  std::vector<std::string_view> names;
  for (const TermKind* kind : TermKinds()) names.push_back(kind->name);
  return Refuse(name, Quoted(name.text), " is not one of ", TermNames(),
                DidYouMean(name.text, names));
}

absl::StatusOr<const Option*> OptionNamed(const TermKind& kind, const Piece& key) {
  if (kind.options.empty()) return Refuse(key, kind.name, " has no options");
  std::vector<std::string_view> names;
  std::string list;
  for (const Option& option : kind.options) {
    if (option.name == key.text) return &option;
    names.push_back(option.name);
    Append(list, list.empty() ? "" : ", ", option.name);
  }
  return Refuse(key, kind.name, ": ", Quoted(key.text), " is not one of its options, ", list,
                DidYouMean(key.text, names));
}

// Null: the term has no preset of this name.
const Preset* PresetNamed(const TermKind& kind, std::string_view name) {
  const auto preset = std::ranges::find(kind.presets, name, &Preset::name);
  return preset == kind.presets.end() ? nullptr : &*preset;
}

absl::Status GivePreset(const Piece& piece, const Preset& preset, Term& term) {
  for (const auto& [option, word] : preset.settings) {
    if (term.values.given(option)) {
      return Refuse(piece, term.kind->name, ": ", preset.name, " sets ", option,
                    ", which is given already");
    }
    term.values.Give(option, word);
  }
  return absl::OkStatus();
}

absl::Status ParseOption(const Piece& piece, Term& term) {
  const TermKind& kind = *term.kind;
  const std::size_t equals = piece.text.find('=');
  const Piece key = piece.Part(0, equals);
  if (equals == std::string_view::npos) {
    const Preset* const preset = PresetNamed(kind, key.text);
    if (preset != nullptr) return GivePreset(key, *preset, term);
  }
  if (key.text.empty()) return Refuse(key, kind.name, ": an option is missing; write key=value");
  const absl::StatusOr<const Option*> option = OptionNamed(kind, key);
  if (!option.ok()) return option.status();
  if (equals == std::string_view::npos) {
    return Refuse(key, kind.name, ": ", key.text, " has no value; write ", key.text, "=VALUE");
  }
  if (term.values.given(key.text)) return Refuse(key, kind.name, ": ", key.text, " is given twice");
  const Piece text = piece.Part(equals + 1);
  absl::StatusOr<Value> value = ParseValue(**option, text.text);
  if (!value.ok()) return Refuse(text, kind.name, ": ", key.text, ": ", value.status().message());
  term.values.Give(key.text, *std::move(value));
  return absl::OkStatus();
}

absl::StatusOr<Term> ParseTerm(const Piece& piece) {
  const std::size_t colon = piece.text.find(':');
  const absl::StatusOr<const TermKind*> kind = KindNamed(piece.Part(0, colon));
  if (!kind.ok()) return kind.status();
  Term term = {.kind = *kind, .at = piece.at, .values = Values((*kind)->options)};
  if (colon == std::string_view::npos) return term;
  for (const Piece& option : Split(piece.Part(colon + 1), ',')) {
    if (absl::Status status = ParseOption(option, term); !status.ok()) return status;
  }
  return term;
}

void AppendTerm(const TermKind& kind, const Values& values, std::string& text) {
  const Values defaults(kind.options);
  Append(text, text.empty() ? "" : "+", kind.name);
  char separator = ':';
  for (const Option& option : kind.options) {
    const Value& value = values.value(option.name);
    if (value == defaults.value(option.name)) continue;
    Append(text, std::exchange(separator, ','), option.name, "=", ValueText(option, value));
  }
}

}  // namespace

absl::StatusOr<Policy> ParsePolicy(std::string_view text) {
  if (text.size() > kMaxPolicyText) {
    return absl::InvalidArgumentError(
        Concat("policy: the text has ", text.size(), " characters; the limit is ", kMaxPolicyText));
  }
  const Piece whole = Piece{text}.Part(0);
  if (absl::Status status = CheckCharacters(whole); !status.ok()) return status;
  std::vector<Term> terms;
  for (const Piece& piece : Split(whole, '+')) {
    if (whole.text.empty()) break;
    absl::StatusOr<Term> term = ParseTerm(piece);
    if (!term.ok()) return term.status();
    terms.push_back(*std::move(term));
  }
  if (absl::Status status = CheckTogether(terms); !status.ok()) return status;

  Policy policy;
  for (const TermKind* kind : TermKinds()) {
    for (const Term& term : terms) {
      if (term.kind == kind) kind->apply(term.values, policy);
    }
  }
  if (absl::Status status = Validate(policy); !status.ok()) return status;
  policy.text = TextOf(policy);
  return policy;
}

std::string TextOf(const Policy& policy) {
  std::string text;
  for (const TermKind* kind : TermKinds()) {
    const std::optional<Values> values = kind->read(policy);
    if (values.has_value()) AppendTerm(*kind, *values, text);
  }
  return text.empty() ? Policy{}.text : text;
}

}  // namespace tessera::policies
