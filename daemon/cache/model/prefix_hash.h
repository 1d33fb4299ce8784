// Hashes that identify prefixes of token lists: a chain of 128-bit hashes, one per block of 32
// token ids. Each hash covers the previous hash and the ids of its block. The chain starts from a
// seed and a text that names the owner of the tokens (tenant, model, policy, rank), so equal
// prefixes have equal hashes on all nodes that use the same algorithm and seed.
//
// A hash only finds candidates. PrefixIndex compares the ids before it reports a match.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace tessera::cache {

// Name of the algorithm, and the number of tokens per block.
inline constexpr std::string_view kPrefixHashName = "xxh3-128/32";
inline constexpr std::size_t kPrefixBlock = 32;

struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend bool operator==(const Hash128&, const Hash128&) = default;
};

// Hashes `data`, chained to `before`, the hash of the bytes that precede it.
using PrefixHash =
    std::function<Hash128(const Hash128& before, const void* data, std::size_t bytes)>;

// XXH3 (128 bits) over `before` (low word, then high word, little endian) and the data.
PrefixHash NewPrefixHash(std::uint64_t seed);

}  // namespace tessera::cache
