// The flags of one subcommand: --name=value, --name value or --switch, and positional arguments.
// Every flag is declared with its help text; an undeclared flag is an error.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli {

// Parses decimal digits only. nullopt on any other character or on overflow.
std::optional<std::uint64_t> WholeNumber(std::string_view text);

enum class FlagKind : std::uint8_t {
  kOwn,
  kConnection,  // explained once, by 'tessera help connection'
  kInternal,    // accepted, but never listed
};

class Flags {
 public:
  struct Spec {
    std::string name;
    std::string value;  // placeholder of the value in --help; empty: a switch
    std::string help;
    std::string fallback;  // default value; empty: none
    FlagKind kind = FlagKind::kOwn;
    std::string environment = {};  // the variable that replaces the default; empty: none
  };
  explicit Flags(std::vector<Spec> specs) : specs_(std::move(specs)) {}

  absl::Status Parse(std::span<const std::string_view> args);
  bool help_asked() const { return help_; }

  bool Declares(std::string_view name) const;
  const std::string& Get(std::string_view name) const;
  bool Has(std::string_view name) const;    // the switch was given, or the value is not empty
  bool Given(std::string_view name) const;  // on the command line
  // INVALID_ARGUMENT names the flag, its value and the allowed range.
  absl::StatusOr<std::uint64_t> Number(std::string_view name, std::uint64_t min,
                                       std::uint64_t max) const;
  const std::vector<std::string>& positional() const { return positional_; }

 private:
  struct Value {
    std::string text;
    bool given = false;
  };
  std::size_t IndexOf(std::string_view name) const;
  absl::Status UnknownFlag(std::string_view name) const;

  const std::vector<Spec> specs_;
  std::vector<Value> values_;
  std::vector<std::string> positional_;
  bool help_ = false;
};

}  // namespace tessera::cli
