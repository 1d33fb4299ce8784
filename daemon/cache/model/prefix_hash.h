// How heads of token lists are told apart: a chain of 128-bit hashes, one for each block of 32
// token ids, each over the one before and the ids of its block. It starts from the hash of a text
// that says whose tokens they are (tenant, model, policy, rank) and from a seed, so that the same
// head has the same hash on every node that agrees on algorithm and seed.
//
// A hash finds; it never decides. PrefixIndex compares what it finds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace tessera::cache {

// The algorithm, and the tokens of a block.
inline constexpr std::string_view kPrefixHashName = "xxh3-128/32";
inline constexpr std::size_t kPrefixBlock = 32;

struct Hash128 {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  friend bool operator==(const Hash128&, const Hash128&) = default;
};

// The hash of bytes that come after those that `before` is of.
using PrefixHash =
    std::function<Hash128(const Hash128& before, const void* data, std::size_t bytes)>;

// XXH3, 128 bits, of `before` (low, then high; little endian) and the bytes.
PrefixHash NewPrefixHash(std::uint64_t seed);

}  // namespace tessera::cache
