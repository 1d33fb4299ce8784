// The options of a policy term. Each option is one table row with its type, default and limits;
// parsing, rendering and help are derived from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::policies {

enum class OptionType : std::uint8_t {
  kNumber,  // 0.25 or 25%
  kCount,   // a whole number; 64K is 65536, 1M is 1048576
  kSwitch,  // 0 or 1
  kWord,    // one of `words`
  kName,    // one of `words`, or a name that the user has given to something
};

struct Option {
  std::string_view name;
  OptionType type;
  bool list = false;          // a|b|c: 1 to kMaxListed distinct numbers, in any order
  std::string_view standard;  // the default, as users write it; empty: none
  // Limits of numbers and counts, inclusive.
  double least = 0;
  double most = 1;
  bool above_least = false;       // excludes `least` itself
  std::uint32_t multiple_of = 1;  // counts only
  // If not empty: the allowed counts, ascending, instead of limits.
  std::span<const double> possible = {};
  std::span<const std::string_view> words = {};
  std::string_view unit;
  std::string_view help;  // one sentence for users, without a full stop
};

inline constexpr std::size_t kMaxListed = 8;

// Names have 1 to 64 letters, digits, '.', '_' and '-'.
inline constexpr std::size_t kMaxName = 64;

struct Value {
  // One number; lists have several, ascending. Counts are below 2^53, hence exact. Switches are 0
  // or 1.
  std::vector<double> numbers;
  std::string_view word;  // for kWord: one of the option's `words`
  std::string name = {};  // for kName

  bool operator==(const Value&) const = default;
};

// INVALID_ARGUMENT names the text and the limit; the caller adds the position.
absl::StatusOr<Value> ParseValue(const Option& option, std::string_view text);

// The canonical text of a value. ParseValue reads it back to an equal value.
std::string ValueText(const Option& option, const Value& value);

std::string TypeText(const Option& option);   // "list of counts"
std::string RangeText(const Option& option);  // "4, 8 or 16"

// The values of all options of a term: given ones, and defaults for the rest. Reading an option
// that is not in the table or has no value is a bug and aborts.
class Values {
 public:
  explicit Values(std::span<const Option> options);

  void Give(std::string_view name, Value value);
  void Give(std::string_view name, double number) { Give(name, Value{{number}, {}}); }
  void Give(std::string_view name, std::string_view word) { Give(name, Value{{}, word}); }

  bool given(std::string_view name) const { return slots_[IndexOf(name)].given; }
  const Value& value(std::string_view name) const { return slots_[IndexOf(name)].value; }

  double Number(std::string_view name) const;
  std::uint64_t Count(std::string_view name) const;
  std::uint32_t Count32(std::string_view name) const;
  bool Switch(std::string_view name) const { return Number(name) != 0; }
  std::string_view Word(std::string_view name) const { return value(name).word; }
  const std::string& Name(std::string_view name) const { return value(name).name; }
  std::vector<std::uint32_t> Counts(std::string_view name) const;

 private:
  struct Slot {
    const Option* option;
    Value value;
    bool given = false;
  };
  std::size_t IndexOf(std::string_view name) const;

  std::vector<Slot> slots_;
};

}  // namespace tessera::policies
