#include "kernels/strategy/candidates.h"

#include <algorithm>
#include <cmath>

namespace tessera::kernels {
namespace {

// Rounds down, with some slack for rounding errors in a share times a count.
std::uint32_t CountDown(double count) {
  return static_cast<std::uint32_t>(std::floor(count + 1e-6));
}

bool IsBetterWithin(const Candidate& a, const Candidate& b) {
  if (a.bytes != b.bytes) return a.bytes < b.bytes;
  return a.shape.group > b.shape.group;
}

bool LosesLess(const Candidate& a, const Candidate& b) {
  if (a.shape.key.kept != b.shape.key.kept) return a.shape.key.kept > b.shape.key.kept;
  return a.shape.group < b.shape.group;
}

}  // namespace

std::uint32_t KeptChannels(double share, std::uint32_t group, std::uint32_t head_dim,
                           std::uint32_t channels) {
  const std::uint32_t kept = std::min(CountDown(share * head_dim), channels);
  return std::max(kept / group * group, group);
}

std::uint32_t ChannelsLeft(double truncated, std::uint32_t head_dim) {
  return std::max(CountDown(head_dim * (1 - truncated)) / 4 * 4, 4u);
}

std::vector<Candidate> ListCandidates(std::uint32_t head_dim, std::uint64_t entries,
                                      std::uint32_t block, const StrategyOptions& options) {
  const std::uint32_t channels = ChannelsLeft(options.truncated, head_dim);
  std::vector<Candidate> candidates;
  for (std::size_t share = 0; share < options.kept.size(); ++share) {
    for (const std::uint32_t group : options.groups) {
      const RowShape row = {.channels = static_cast<std::uint16_t>(channels),
                            .kept = static_cast<std::uint16_t>(
                                KeptChannels(options.kept[share], group, head_dim, channels))};
      const TileShape shape = {.format = PackedFormat(options.values),
                               .head_dim = static_cast<std::uint16_t>(head_dim),
                               .key = row,
                               .value = row,
                               .group = static_cast<std::uint8_t>(group),
                               .summary = block == 0 ? Summary::kNone : options.summary,
                               .block = static_cast<std::uint8_t>(block)};
      candidates.push_back({.shape = shape,
                            .bytes = BytesPerEntry(shape, options.rotation_type, entries),
                            .share = share});
    }
  }
  return candidates;
}

bool IsWithin(const Loss& loss, const Loss& threshold) {
  return loss.key <= threshold.key && loss.value <= threshold.value;
}

std::size_t ChooseCandidate(const std::vector<Candidate>& candidates, const Loss& threshold) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    const bool within = IsWithin(candidates[i].loss, threshold);
    const bool best_is_within = IsWithin(candidates[best].loss, threshold);
    if (within != best_is_within) {
      if (within) best = i;
    } else if (within ? IsBetterWithin(candidates[i], candidates[best])
                      : LosesLess(candidates[i], candidates[best])) {
      best = i;
    }
  }
  return best;
}

}  // namespace tessera::kernels
