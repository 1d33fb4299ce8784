// Ids as people type them: "s51" for sequence 51 of the first tenant, "s2.51" of the second.
// The daemon's ids are 64-bit numbers: the number of the tenant in the upper 16 bits, and a count
// in the lower 48.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::cli {

inline constexpr char kSequenceLetter = 's';
inline constexpr char kPrefixLetter = 'p';
inline constexpr char kSessionLetter = 'w';  // a worker's session

std::string ShortId(char letter, std::uint64_t id);

// Reads "s51", "s2.51", "51" and the whole number. `letters`: those that are allowed. nullopt: not
// an id.
std::optional<std::uint64_t> ParseId(std::string_view text, std::string_view letters);

}  // namespace tessera::cli
