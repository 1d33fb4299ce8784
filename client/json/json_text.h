// Strings and ids in JSON.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::client {

// `text` as a JSON string, quotes included.
std::string JsonString(const std::string& text);

inline constexpr char kSequenceLetter = 's';
inline constexpr char kPrefixLetter = 'p';
inline constexpr char kSessionLetter = 'w';  // a worker's session

// An id as people type it: "s51" for sequence 51 of the first tenant, "s2.51" of the second. Ids
// are 64-bit numbers: the number of the tenant in the upper 16 bits, and a count in the lower 48.
std::string ShortId(char letter, std::uint64_t id);
inline constexpr int kIdCountBits = 48;

}  // namespace tessera::client
