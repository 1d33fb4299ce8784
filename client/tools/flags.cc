#include "client/tools/flags.h"

#include <algorithm>
#include <charconv>
#include <vector>

#include "client/tools/environment.h"
#include "daemon/base/check.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

std::optional<std::uint64_t> WholeNumber(std::string_view text) {
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

absl::Status Flags::UnknownFlag(std::string_view name) const {
  std::string known;
  std::vector<std::string_view> names;
  for (const Spec& spec : specs_) {
    if (spec.kind == FlagKind::kInternal) continue;
    names.push_back(spec.name);
    if (spec.kind == FlagKind::kOwn) Append(known, " --", spec.name);
  }
  return absl::InvalidArgumentError(
      Concat("unknown flag --", name,
             known.empty() ? "; it has no flags of its own" : Concat("; its flags are", known),
             DidYouMean(name, names)));
}

absl::Status Flags::Parse(std::span<const std::string_view> args) {
  values_.clear();
  for (const Spec& spec : specs_) {
    std::string set = spec.environment.empty() ? "" : ReadEnvironment(spec.environment);
    values_.push_back({set.empty() ? spec.fallback : std::move(set), false});
  }
  for (std::size_t i = 0; i < args.size(); ++i) {
    std::string_view arg = args[i];
    if (arg == "--help" || arg == "-h") {
      help_ = true;
      continue;
    }
    if (arg == "--") {  // no flags after it
      for (++i; i < args.size(); ++i) positional_.emplace_back(args[i]);
      break;
    }
    if (arg.substr(0, 2) != "--") {
      positional_.emplace_back(arg);
      continue;
    }
    arg.remove_prefix(2);
    const std::size_t equals = arg.find('=');
    const std::string_view name = arg.substr(0, equals);
    const auto spec = std::ranges::find(specs_, name, &Spec::name);
    if (spec == specs_.end()) return UnknownFlag(name);
    Value& value = values_[static_cast<std::size_t>(spec - specs_.begin())];
    value.given = true;
    if (equals != std::string_view::npos && spec->value.empty()) {
      return absl::InvalidArgumentError(Concat("--", name, " takes no value"));
    }
    if (equals != std::string_view::npos) {
      value.text = std::string(arg.substr(equals + 1));
    } else if (!spec->value.empty()) {
      if (++i == args.size()) {
        return absl::InvalidArgumentError(Concat("--", name, " needs a value"));
      }
      value.text = std::string(args[i]);
    }
  }
  return absl::OkStatus();
}

std::size_t Flags::IndexOf(std::string_view name) const {
  for (std::size_t i = 0; i < specs_.size(); ++i) {
    if (specs_[i].name == name) return i;
  }
  CheckFailed(__FILE__, __LINE__, "the flag is declared", name);
}

bool Flags::Declares(std::string_view name) const {
  return std::ranges::any_of(specs_, [name](const Spec& spec) { return spec.name == name; });
}

const std::string& Flags::Get(std::string_view name) const { return values_[IndexOf(name)].text; }

bool Flags::Has(std::string_view name) const {
  const std::size_t i = IndexOf(name);
  return specs_[i].value.empty() ? values_[i].given : !values_[i].text.empty();
}

bool Flags::Given(std::string_view name) const { return values_[IndexOf(name)].given; }

absl::StatusOr<std::uint64_t> Flags::Number(std::string_view name, std::uint64_t min,
                                            std::uint64_t max) const {
  const std::string& text = Get(name);
  const std::optional<std::uint64_t> value = WholeNumber(text);
  if (!value.has_value() || *value < min || *value > max) {
    return absl::InvalidArgumentError(Concat(
        "--", name, " is \"", text, "\"; it must be a whole number from ", min, " to ", max));
  }
  return *value;
}

}  // namespace tessera::cli
