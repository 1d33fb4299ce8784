// From logits to a token.
#pragma once

#include <cstdint>
#include <random>
#include <span>

#include "client/model/checkpoint/vocab.h"

namespace tessera::llm {

struct SamplerOptions {
  double temperature = 0;   // 0: the likeliest token, the lowest of equals
  std::uint32_t top_k = 0;  // among so many of the likeliest; 0: all
  std::uint64_t seed = 0;
};

// The same choices from the same seed, on every machine whose logits are the same.
class Sampler {
 public:
  explicit Sampler(const SamplerOptions& options) : options_(options), random_(options.seed) {}
  // `logits` is not empty.
  TokenId Choose(std::span<const float> logits);

 private:
  const SamplerOptions options_;
  std::mt19937_64 random_;
};

}  // namespace tessera::llm
