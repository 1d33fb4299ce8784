// Every system and modifier that a policy may name: one row each. To add one: a file with its row,
// a line in registry.cc, its table in README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "daemon/policies/option.h"
#include "daemon/policies/policy.h"

namespace tessera::policies {

// Terms that decide the same are never in one policy.
enum class Decides : std::uint8_t {
  kNothing,    // stands alone
  kTokens,     // which tokens stay
  kMerging,    // which of them become one
  kPacking,    // whether and how rows are packed
  kSelection,  // what attention reads
  kValues,     // the type of packed values
};
std::string_view DecidesText(Decides decides);  // "what attention reads"

struct TermKind;
struct TokenSystem;

// A kind of term with values for its options: "quest:page=8".
struct Term {
  const TermKind* kind;
  std::size_t at;  // the character of the text that it begins with, from 1
  Values values;
};

struct TermKind {
  std::string_view name;
  std::string_view is;          // one sentence, without its full stop
  std::string_view sets;        // which parts of Policy
  std::string_view paper = {};  // where the system is from
  Decides decides;
  bool own_summaries = false;  // brings block summaries, whoever packs the rows
  std::span<const Option> options = {};
  // What is wrong with the options beside each other, or beside the policy's other terms; empty:
  // nothing. Null: nothing can be. Limits of single options are not its matter.
  std::string (*check)(const Term& term, std::span<const Term> all) = nullptr;
  // Only of values that are within their limits, together with terms that have been checked; in the
  // registry's order.
  void (*apply)(const Values& values, Policy& policy);
  // The values that apply to this policy, those given that say something beyond the defaults of the
  // terms before. Nothing where the policy's text does without the term.
  std::optional<Values> (*read)(const Policy& policy);
  const TokenSystem* tokens = nullptr;  // of terms that decide which tokens stay: how
};

// In the order of canonical text.
std::span<const TermKind* const> TermKinds();

const TermKind* FindTermKind(std::string_view name);  // null: there is none

// Of a term that chooses by what the worker shows: what that is where all options have their
// defaults. Empty: it chooses nothing.
std::string NeedsTextOf(const TermKind& kind);

std::string TermNames();  // "dense, mosaickv, ..."

}  // namespace tessera::policies
