#include "daemon/policies/option.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"

namespace tessera::policies {
namespace {

absl::Status Refuse(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(Concat("\"", text, "\" ", why));
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// nullopt: not a number. Percent becomes an exponent in the text, so that 33.3% and 0.333 are the
// same double.
std::optional<double> ReadNumber(std::string_view text) {
  if (text.empty()) return std::nullopt;
  if (text.front() == '-') {  // parsed, so that the error can name the limit
    const std::optional<double> below = ReadNumber(text.substr(1));
    return below.has_value() && *below > 0 ? std::optional<double>(-*below) : std::nullopt;
  }
  if (!IsDigit(text.front()) && text.front() != '.') return std::nullopt;  // no sign, inf or nan
  std::string digits(text);
  if (text.back() == '%') {
    if (text.find_first_of("eE") != std::string_view::npos) return std::nullopt;
    digits = Concat(Trim(text.substr(0, text.size() - 1)), "e-2");
  }
  double number = 0;
  const char* const end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return number;
}

// nullopt: not a count. On overflow the largest number, which exceeds every limit.
std::optional<std::uint64_t> ReadCount(std::string_view text) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();
  if (text.empty()) return std::nullopt;
  const std::uint64_t unit = text.back() == 'K' ? kKiB : text.back() == 'M' ? kMiB : 1;
  if (unit != 1) text.remove_suffix(1);
  std::uint64_t count = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, count);
  if (text.empty() || parsed.ptr != end) return std::nullopt;
  if (parsed.ec == std::errc::result_out_of_range || count > kMost / unit) return kMost;
  if (parsed.ec != std::errc()) return std::nullopt;
  return count * unit;
}

std::string CountText(double number) {
  const auto count = static_cast<std::uint64_t>(number);
  if (count >= kMiB && count % kMiB == 0) return Concat(count / kMiB, "M");
  if (count >= 10000 && count % kKiB == 0) return Concat(count / kKiB, "K");
  return Concat(count);
}

std::string NumberText(const Option& option, double number) {
  return option.type == OptionType::kNumber ? Concat(number) : CountText(number);
}

// "4, 8 or 16"
std::string Alternatives(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    Append(text, i == 0 ? "" : i + 1 == words.size() ? " or " : ", ", words[i]);
  }
  return text;
}

std::string LimitText(const Option& option) {
  if (option.type == OptionType::kSwitch) return "0 or 1";
  std::vector<std::string> words(option.words.begin(), option.words.end());
  for (const double number : option.possible) words.push_back(CountText(number));
  if (option.type == OptionType::kName) {
    words.push_back("a name of 1 to 64 letters, digits, '.', '_' and '-'");
  }
  if (!words.empty()) return Alternatives(words);
  const std::string most = NumberText(option, option.most);
  if (option.above_least) {
    return Concat("above ", NumberText(option, option.least), ", up to ", most);
  }
  std::string text = Concat(NumberText(option, option.least), " to ", most);
  if (option.multiple_of != 1) Append(text, ", a multiple of ", option.multiple_of);
  return text;
}

bool Allows(const Option& option, double number) {
  if (!option.possible.empty()) return std::ranges::count(option.possible, number) != 0;
  if (number < option.least || number > option.most) return false;
  if (option.above_least && number == option.least) return false;
  return option.multiple_of == 1 || std::fmod(number, option.multiple_of) == 0;
}

absl::StatusOr<double> ParseOne(const Option& option, std::string_view text) {
  std::optional<double> number;
  if (option.type == OptionType::kNumber) {
    number = ReadNumber(text);
    if (!number.has_value()) return Refuse(text, "is not a number, such as 0.25 or 25%");
  } else if (const auto count = ReadCount(text); count.has_value()) {
    number = static_cast<double>(*count);
  } else if (option.type == OptionType::kCount) {
    return Refuse(text, option.possible.empty() ? "is not a whole number, such as 4096 or 64K"
                                                : Concat("is not ", LimitText(option)));
  }
  const bool allowed =
      number.has_value() &&
      (option.type == OptionType::kSwitch ? *number == 0 || *number == 1 : Allows(option, *number));
  if (!allowed) return Refuse(text, Concat("is not ", LimitText(option)));
  return *number;
}

absl::StatusOr<Value> ParseWord(const Option& option, std::string_view text) {
  for (const std::string_view word : option.words) {
    if (word == text) return Value{{}, word};
  }
  return Refuse(text, Concat("is not ", LimitText(option), DidYouMean(text, option.words)));
}

absl::StatusOr<Value> ParseName(const Option& option, std::string_view text) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || IsDigit(c) || c == '.' || c == '_' ||
           c == '-';
  };
  if (text.empty() || text.size() > kMaxName || !std::ranges::all_of(text, allowed)) {
    return Refuse(text, Concat("is not ", LimitText(option)));
  }
  return Value{{}, {}, std::string(text)};
}

}  // namespace

absl::StatusOr<Value> ParseValue(const Option& option, std::string_view text) {
  text = Trim(text);
  if (option.type == OptionType::kWord) return ParseWord(option, text);
  if (option.type == OptionType::kName) return ParseName(option, text);
  Value value;
  for (bool more = true; more;) {
    const std::size_t bar = option.list ? text.find('|') : std::string_view::npos;
    more = bar != std::string_view::npos;
    const absl::StatusOr<double> number = ParseOne(option, Trim(text.substr(0, bar)));
    if (!number.ok()) return number.status();
    if (std::ranges::count(value.numbers, *number) != 0) {
      return Refuse(Trim(text.substr(0, bar)), "is given twice");
    }
    value.numbers.push_back(*number);
    if (value.numbers.size() > kMaxListed) {
      return absl::InvalidArgumentError(Concat("the list has more than ", kMaxListed, " values"));
    }
    if (more) text.remove_prefix(bar + 1);
  }
  std::ranges::sort(value.numbers);
  return value;
}

std::string ValueText(const Option& option, const Value& value) {
  if (option.type == OptionType::kWord) return std::string(value.word);
  if (option.type == OptionType::kName) return value.name;
  std::string text;
  for (const double number : value.numbers) {
    Append(text, text.empty() ? "" : "|", NumberText(option, number));
  }
  return text;
}

std::string TypeText(const Option& option) {
  switch (option.type) {
    case OptionType::kNumber:
      return option.list ? "list of numbers" : "number";
    case OptionType::kCount:
      return option.list ? "list of counts" : "count";
    case OptionType::kSwitch:
      return "switch";
    case OptionType::kWord:
      return "word";
    case OptionType::kName:
      return "name";
  }
  return "unknown";
}

std::string RangeText(const Option& option) {
  return option.list ? Concat("each ", LimitText(option)) : LimitText(option);
}

Values::Values(std::span<const Option> options) {
  for (const Option& option : options) {
    Slot slot = {.option = &option, .value = {}};
    if (!option.standard.empty()) {
      absl::StatusOr<Value> value = ParseValue(option, option.standard);
      TESSERA_CHECK(value.ok(), AsStringView(value.status().message()));
      slot.value = *std::move(value);
    }
    slots_.push_back(std::move(slot));
  }
}

void Values::Give(std::string_view name, Value value) {
  Slot& slot = slots_[IndexOf(name)];
  slot.value = std::move(value);
  slot.given = true;
}

double Values::Number(std::string_view name) const {
  const std::vector<double>& numbers = value(name).numbers;
  TESSERA_CHECK(numbers.size() == 1, name);
  return numbers.front();
}

std::uint64_t Values::Count(std::string_view name) const {
  return static_cast<std::uint64_t>(Number(name));
}

std::uint32_t Values::Count32(std::string_view name) const {
  return static_cast<std::uint32_t>(Number(name));
}

std::vector<std::uint32_t> Values::Counts(std::string_view name) const {
  const std::vector<double>& numbers = value(name).numbers;
  return {numbers.begin(), numbers.end()};
}

std::size_t Values::IndexOf(std::string_view name) const {
  const auto slot = std::ranges::find_if(
      slots_, [name](const Slot& candidate) { return candidate.option->name == name; });
  TESSERA_CHECK(slot != slots_.end(), name);
  return static_cast<std::size_t>(slot - slots_.begin());
}

}  // namespace tessera::policies
