// What a strategy may choose between: how many channels each row keeps, in what groups.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/tile_shape.h"
#include "kernels/strategy/loss.h"
#include "kernels/strategy/strategy.h"

namespace tessera::kernels {

struct Candidate {
  TileShape shape;        // K and V rows alike
  double bytes = 0;       // per entry
  std::size_t share = 0;  // index in StrategyOptions::kept
  Loss loss;
};

// The channels that a share leaves of a row, in whole groups, at least one.
std::uint32_t KeptChannels(double share, std::uint32_t group, std::uint32_t head_dim,
                           std::uint32_t channels);

// The channels left when the weakest are cut off: a multiple of 4, and so of every group.
std::uint32_t ChannelsLeft(double truncated, std::uint32_t head_dim);

// Every share in every group, with blocks of `block` entries. Losses are not known yet.
std::vector<Candidate> ListCandidates(std::uint32_t head_dim, std::uint64_t entries,
                                      std::uint32_t block, const StrategyOptions& options);

// The index of the one to take: see StrategyOptions::threshold.
std::size_t ChooseCandidate(const std::vector<Candidate>& candidates, const Loss& threshold);
bool IsWithin(const Loss& loss, const Loss& threshold);

}  // namespace tessera::kernels
