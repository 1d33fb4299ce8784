// Attention by its definition, and how far another one is from it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/strategy/loss.h"

namespace tessera::cli::bench {

// K and V of a lane in fp32, as they are or as some form of storage leaves them.
struct FloatLane {
  std::uint32_t head_dim = 0;
  std::vector<float> keys;  // [tokens][head_dim]
  std::vector<float> values;

  std::uint64_t tokens() const { return head_dim == 0 ? 0 : keys.size() / head_dim; }
  void Append(const FloatLane& more);
};

FloatLane Widen(const kernels::LaneRows& rows);

struct Attention {
  std::vector<double> weights;  // per token; 0 of those that are not looked at
  std::vector<double> output;   // head_dim
};

// Of a bf16 query that sees all tokens; scale 1 / sqrt(head_dim). `taken`: 1 where a token is
// looked at, at least one; empty: all are.
Attention Attend(std::span<const std::uint16_t> query, const FloatLane& lane,
                 std::span<const std::uint8_t> taken = {});

// What an answer is worth against the true one.
struct Fidelity {
  double error = 0;      // |output - truth| / |truth|
  double kept_mass = 0;  // sum over tokens of min(weight, true weight): 1 where none is displaced.
                         // Of a selection: the true attention of the tokens that are looked at.
};
Fidelity Compare(const Attention& answer, const Attention& truth);

}  // namespace tessera::cli::bench
