// How far a sequence of so many tokens may go on, where nobody knows. What may still be asked for
// of its tokens is kept, and handed on, for as many as that.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tessera {

inline std::uint64_t FutureTokens(std::uint64_t tokens) {
  constexpr std::uint64_t kLeast = 4096;
  return tokens + std::max(tokens, kLeast);
}

}  // namespace tessera
