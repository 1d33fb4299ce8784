// Exact attention, and the distance of another attention from it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/strategy/loss.h"

namespace tessera::cli::bench {

// K and V of a lane in fp32: exact, or as decoded from a storage format.
struct FloatLane {
  std::uint32_t head_dim = 0;
  std::vector<float> keys;  // [tokens][head_dim]
  std::vector<float> values;

  std::uint64_t tokens() const { return head_dim == 0 ? 0 : keys.size() / head_dim; }
  void Append(const FloatLane& more);
};

FloatLane Widen(const kernels::LaneRows& rows);

struct Attention {
  std::vector<double> weights;  // per token; 0 for tokens not read
  std::vector<double> output;   // head_dim
};

// Attention of a bf16 query over all tokens, scale 1 / sqrt(head_dim). `taken`: 1 for each token to
// read, at least one; empty: all tokens.
Attention Attend(std::span<const std::uint16_t> query, const FloatLane& lane,
                 std::span<const std::uint8_t> taken = {});

// Quality of an approximate attention.
struct Fidelity {
  double error = 0;      // |output - truth| / |truth|
  double kept_mass = 0;  // sum over tokens of min(weight, true weight); 1: identical weights.
                         // For a selection: the true attention mass of the tokens read.
};
Fidelity Compare(const Attention& answer, const Attention& truth);

}  // namespace tessera::cli::bench
