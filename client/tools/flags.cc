#include "client/tools/flags.h"

#include <algorithm>
#include <charconv>
#include <vector>

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

absl::Status Flags::Parse(std::span<const std::string_view> args) {
  values_.clear();
  for (const Spec& spec : specs_) values_.push_back({spec.fallback, false});
  for (std::size_t i = 0; i < args.size(); ++i) {
    std::string_view arg = args[i];
    if (arg == "--help" || arg == "-h") {
      help_ = true;
      continue;
    }
    if (arg.substr(0, 2) != "--") {
      positional_.emplace_back(arg);
      continue;
    }
    arg.remove_prefix(2);
    const std::size_t equals = arg.find('=');
    const std::string_view name = arg.substr(0, equals);
    std::size_t index = 0;
    while (index < specs_.size() && specs_[index].name != name) ++index;
    if (index == specs_.size()) {
      std::string known;
      std::vector<std::string_view> names;
      for (const Spec& spec : specs_) {
        if (spec.internal) continue;
        Append(known, " --", spec.name);
        names.push_back(spec.name);
      }
      return absl::InvalidArgumentError(
          Concat("unknown flag --", name, "; this command takes:", known, DidYouMean(name, names)));
    }
    values_[index].given = true;
    if (equals != std::string_view::npos && specs_[index].value.empty()) {
      return absl::InvalidArgumentError(Concat("--", name, " takes no value"));
    }
    if (equals != std::string_view::npos) {
      values_[index].text = std::string(arg.substr(equals + 1));
    } else if (!specs_[index].value.empty()) {
      if (++i == args.size()) {
        return absl::InvalidArgumentError(Concat("--", name, " needs a value"));
      }
      values_[index].text = std::string(args[i]);
    }
  }
  return absl::OkStatus();
}

std::string Flags::Help() const {
  std::string out = usage_ + "\n";
  if (!specs_.empty()) out += "\n";
  for (const Spec& spec : specs_) {
    if (spec.internal) continue;
    std::string left = Concat("  --", spec.name);
    if (!spec.value.empty()) Append(left, "=", spec.value);
    left.resize(std::max<std::size_t>(left.size() + 2, 30), ' ');
    Append(out, left, spec.help);
    if (!spec.fallback.empty()) Append(out, " (default ", spec.fallback, ")");
    out += "\n";
  }
  return out;
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
