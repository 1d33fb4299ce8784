// The command line of one subcommand: --name=value, --name value, --switch; the rest is positional.
// Every flag is declared with its help, and an undeclared one is an error that lists what there is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera::cli {

// Digits and nothing else; nothing where it does not fit.
std::optional<std::uint64_t> WholeNumber(std::string_view text);

class Flags {
 public:
  struct Spec {
    std::string name;
    std::string value;  // what stands for the value in the help; empty: a switch
    std::string help;
    std::string fallback;
  };
  // `usage`: "tessera status [--json]", and what it does.
  Flags(std::string usage, std::vector<Spec> specs)
      : usage_(std::move(usage)), specs_(std::move(specs)) {}

  absl::Status Parse(std::span<const std::string_view> args);
  bool help_asked() const { return help_; }
  std::string Help() const;

  const std::string& Get(std::string_view name) const;
  bool Has(std::string_view name) const;  // a switch was given, or a value is not empty
  // INVALID_ARGUMENT names flag, value and range.
  absl::StatusOr<std::uint64_t> Number(std::string_view name, std::uint64_t min,
                                       std::uint64_t max) const;
  const std::vector<std::string>& positional() const { return positional_; }

 private:
  struct Value {
    std::string text;
    bool given = false;
  };
  std::size_t IndexOf(std::string_view name) const;

  const std::string usage_;
  const std::vector<Spec> specs_;
  std::vector<Value> values_;
  std::vector<std::string> positional_;
  bool help_ = false;
};

}  // namespace tessera::cli
