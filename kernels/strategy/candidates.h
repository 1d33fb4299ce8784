// The candidates for a strategy: how many channels each row keeps, and in what groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/tile_shape.h"
#include "kernels/strategy/loss.h"
#include "kernels/strategy/strategy.h"

namespace tessera::kernels {

struct Candidate {
  TileShape shape;        // K and V rows have the same shape
  double bytes = 0;       // per entry
  std::size_t share = 0;  // index in StrategyOptions::kept
  Loss loss;
};

// The number of channels kept for a share of head_dim: whole groups, at least one.
std::uint32_t KeptChannels(double share, std::uint32_t group, std::uint32_t head_dim,
                           std::uint32_t channels);

// The number of channels left after truncating the weakest: a multiple of 4, and so of every group.
std::uint32_t ChannelsLeft(double truncated, std::uint32_t head_dim);

// Every share with every group, with blocks of `block` entries. Losses are filled in later.
std::vector<Candidate> ListCandidates(std::uint32_t head_dim, std::uint64_t entries,
                                      std::uint32_t block, const StrategyOptions& options);

// The index of the best candidate: see StrategyOptions::threshold.
std::size_t ChooseCandidate(const std::vector<Candidate>& candidates, const Loss& threshold);
bool IsWithin(const Loss& loss, const Loss& threshold);

}  // namespace tessera::kernels
