// The baseline of memory-bound figures: reading memory and doing next to nothing with it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::cli::bench {

// A checksum of `bytes` bytes at `data` (64-byte multiples), read with the widest loads this
// machine has.
std::uint64_t StreamRead(const std::byte* data, std::size_t bytes);

}  // namespace tessera::cli::bench
