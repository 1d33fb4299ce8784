// Parses policy text, and renders a policy as canonical text.
//
//   policy = [term {"+" term}]            empty: dense
//   term   = name [":" key "=" value {"," key "=" value}]
//   value  = item {"|" item}
//
// Spaces around any of these are skipped, as is white space at both ends of the text. README.md has
// examples.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/policies/policy.h"

namespace tessera::policies {

inline constexpr std::size_t kMaxPolicyText = 1024;  // characters

// INVALID_ARGUMENT names the position of the error, the term, the option, the value and its limit.
// A returned policy has passed Validate, and its `text` is canonical.
absl::StatusOr<Policy> ParsePolicy(std::string_view text);

// The canonical text of a policy that ParsePolicy could return: terms in registry order, and
// options in table order, only those that differ from their defaults. Equal policies have equal
// text.
std::string TextOf(const Policy& policy);

}  // namespace tessera::policies
