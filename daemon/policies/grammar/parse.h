// From words to a policy, and back.
//
//   policy = [term {"+" term}]            empty: dense
//   term   = name [":" key "=" value {"," key "=" value}]
//   value  = item {"|" item}
//
// Spaces around any of these are skipped, and any white space at the ends of the text. README.md
// has examples.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/policies/policy.h"

namespace tessera::policies {

inline constexpr std::size_t kMaxPolicyText = 1024;  // characters

// INVALID_ARGUMENT names the character where the fault stands, the term, the key, the value and its
// limit; UNIMPLEMENTED a system that this version does not serve. A policy that is returned has
// passed Validate, and its `text` parses to the same.
absl::StatusOr<Policy> ParsePolicy(std::string_view text);

// The canonical text of a policy that ParsePolicy could return: terms in the registry's order,
// options in their tables' order and only where they differ from the default. Equal policies have
// equal text.
std::string TextOf(const Policy& policy);

}  // namespace tessera::policies
