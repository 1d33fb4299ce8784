// ExpectedTokens estimates the length a sequence may still reach, because the daemon does not know
// it. Observations that a later decision may need are kept, and handed over, for that length.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera {

inline std::uint64_t ExpectedTokens(std::uint64_t tokens) {
  constexpr std::uint64_t kLeast = 4096;
  return tokens + std::max(tokens, kLeast);
}

}  // namespace tessera
