// Reads ids as people type them (client/json/json_text.h writes them).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "client/json/json_text.h"

namespace tessera::cli {

using client::kPrefixLetter;
using client::kSequenceLetter;
using client::kSessionLetter;
using client::ShortId;

// Reads "s51", "s2.51", "51" and the whole number. `letters`: those that are allowed. nullopt: not
// an id.
std::optional<std::uint64_t> ParseId(std::string_view text, std::string_view letters);

}  // namespace tessera::cli
