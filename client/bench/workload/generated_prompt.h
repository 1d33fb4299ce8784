// A prompt as a worker appends it, of generated rows.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/sequence.h"

namespace tessera::cli::bench {

// Of every layer, in bf16.
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

// Two heads are made and used four times: each lane is compressed for itself.
GeneratedPrompt MakePrompt(std::uint64_t tokens, std::uint64_t seed);

}  // namespace tessera::cli::bench
