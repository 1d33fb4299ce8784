// Chooses a token from logits: greedy, or by temperature and top-k.
#pragma once

#include <cstdint>
#include <random>
#include <span>

#include "client/model/checkpoint/vocab.h"

namespace tessera::llm {

struct SamplerOptions {
  double temperature = 0;   // 0: greedy; of equal logits the lowest token id wins
  std::uint32_t top_k = 0;  // sample among the k likeliest tokens; 0: among all
  std::uint64_t seed = 0;
};

// Deterministic: equal seeds and logits give equal choices on every machine.
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
