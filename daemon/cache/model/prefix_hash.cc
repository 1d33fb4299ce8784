#include "daemon/cache/model/prefix_hash.h"

#include <array>
#include <bit>
#include <cstring>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::cache {

static_assert(std::endian::native == std::endian::little, "hashes are exchanged between nodes");

PrefixHash NewPrefixHash(std::uint64_t seed) {
  return [seed](const Hash128& before, const void* data, std::size_t bytes) {
    // The buffer fits one block. The text at the start of a chain may be longer.
    std::array<std::byte, sizeof before + kPrefixBlock * sizeof(std::uint32_t)> block;
    std::vector<std::byte> longer;
    std::byte* at = block.data();
    if (sizeof before + bytes > block.size()) {
      longer.resize(sizeof before + bytes);
      at = longer.data();
    }
    std::memcpy(at, &before.low, sizeof before.low);
    std::memcpy(at + sizeof before.low, &before.high, sizeof before.high);
    std::memcpy(at + sizeof before, data, bytes);
    const XXH128_hash_t hash = XXH3_128bits_withSeed(at, sizeof before + bytes, seed);
    return Hash128{.low = hash.low64, .high = hash.high64};
  };
}

}  // namespace tessera::cache
