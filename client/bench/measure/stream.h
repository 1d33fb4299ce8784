// The baseline of memory-bound figures: a streaming read of memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::cli::bench {

// Reads `bytes` bytes at `data` (both multiples of 64) with the machine's widest loads and returns
// a checksum.
std::uint64_t StreamRead(const std::byte* data, std::size_t bytes);

}  // namespace tessera::cli::bench
