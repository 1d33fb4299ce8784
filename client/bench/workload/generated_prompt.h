// A prompt of generated rows, in the layout of Append.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/sequence.h"

namespace tessera::cli::bench {

// Shape of every layer; bf16.
inline constexpr std::uint32_t kKvHeads = 8;
inline constexpr std::uint32_t kHeadDim = 128;

// K and V of a layer: [tokens][kv_heads][head_dim].
struct GeneratedPrompt {
  std::vector<std::uint16_t> key;
  std::vector<std::uint16_t> value;
  std::uint64_t tokens = 0;

  // The first `count` tokens.
  client::AppendTensors Tensors(std::uint64_t count) const;
};

// Generates two kv heads and uses each four times: lanes are compressed independently.
GeneratedPrompt MakePrompt(std::uint64_t tokens, std::uint64_t seed);

}  // namespace tessera::cli::bench
