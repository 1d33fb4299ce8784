// The registry of policy terms: one TermKind per system or modifier that a policy may name.
// README.md lists the steps to add one.
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

// What a term decides. A policy has at most one term of each kind.
enum class Decides : std::uint8_t {
  kNothing,    // cannot be combined with other terms
  kTokens,     // which tokens are kept
  kMerging,    // which kept tokens are merged
  kPacking,    // whether and how rows are packed
  kSelection,  // what attention reads
  kValues,     // the type of packed values
};
std::string_view DecidesText(Decides decides);  // "what attention reads"

struct TermKind;
struct TokenSystem;

// A term of a policy text: a kind with values for its options, such as "quest:page=8".
struct Term {
  const TermKind* kind;
  std::size_t at;  // position of its first character in the text, from 1
  Values values;
};

// A word that stands for values of options, as in "planes:small".
struct Preset {
  std::string_view name;
  struct Setting {
    std::string_view option;
    std::string_view word;  // for options of type kWord
  };
  std::span<const Setting> settings;
};

struct TermKind {
  std::string_view name;
  std::string_view is;          // one sentence for users, without a full stop
  std::string_view sets;        // which parts of a policy it sets, for users
  std::string_view paper = {};  // citation
  Decides decides;
  bool own_summaries = false;  // defines the block summaries, also of packed rows
  std::span<const Option> options = {};
  std::span<const Preset> presets = {};
  // Checks combinations of options and of terms: returns the conflict, or "". Null: there can be
  // none. Limits of single options are checked by the parser.
  std::string (*check)(const Term& term, std::span<const Term> all) = nullptr;
  // Writes the term's part of the policy. Called in registry order, after all checks.
  void (*apply)(const Values& values, Policy& policy);
  // The inverse of `apply`: the values to write in the policy's canonical text, marked as given if
  // they differ from what earlier terms imply. nullopt: the text does not need the term.
  std::optional<Values> (*read)(const Policy& policy);
  const TokenSystem* tokens = nullptr;  // set for terms that decide about tokens
};

// In the order of terms in canonical text.
std::span<const TermKind* const> TermKinds();

// The terms that re-encode or drop rows: the systems.
inline constexpr std::size_t kSystems = 14;
std::span<const TermKind* const, kSystems> Systems();
// Index in Systems() of the policy's first system, in the order of its text; nullopt: it has none.
std::optional<std::size_t> SystemOf(const Policy& policy);

const TermKind* FindTermKind(std::string_view name);  // null: unknown name

// What the worker must observe for the term, with default options. Empty: the term decides nothing
// from observations.
std::string NeedsTextOf(const TermKind& kind);

std::string TermNames();  // "dense, mosaickv, ..."

}  // namespace tessera::policies
