// Chooses the strategy of a segment of one lane from the rows themselves: rotations, channels kept
// per row, group size and block length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/operations.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/aligned_bytes.h"
#include "kernels/strategy/loss.h"
#include "kernels/strategy/moments.h"

namespace tessera::kernels {

struct StrategyOptions {
  // Candidates: shares of the channels that each row keeps, rounded down to whole groups.
  std::vector<double> kept = {0.125, 0.25, 0.375};
  std::vector<std::uint32_t> groups = {1, 2, 4};
  // A candidate is acceptable if both of its mean losses, measured on rows that its rotation was
  // not made from, are at most these. If none is, the largest share with the smallest group is
  // used.
  Loss threshold = {.key = 0.10, .value = 0.15};
  // The share of channels that are truncated for all rows, weakest first. The number of channels
  // left is rounded down to a multiple of 4.
  double truncated = 0;
  // Whether channels that rows keep together may be made adjacent. Done only if it lowers the loss.
  bool reorder = true;
  Summary summary = Summary::kMean;
  // Entries per block: the largest of these that satisfies `block_variance`, otherwise the
  // smallest. Empty: no summaries.
  std::vector<std::uint32_t> blocks = {4, 8, 16};
  // The limit for sum |k - mean|^2 / sum |k|^2 over a block's keys, averaged over blocks. At 1 the
  // mean carries no information about the keys.
  double block_variance = 0.5;
  ValueType values = ValueType::kBf16;
  ElementType rotation_type = ElementType::kBf16;
  // Upper limits on the rows sampled from a segment, spread over it in whole tiles if one fits: for
  // measuring losses, for the trial rotation, and for finding channels that are kept together.
  std::uint64_t sampled_rows = 4096;
  std::uint64_t trial_rows = 8192;
  std::uint64_t reorder_rows = 1024;
};

struct Strategy {
  TileShape shape;  // K and V rows have the same shape
  // R_k, then R_v, each [channels][head_dim] of `rotation_type` and RotationBytes long. Losses and
  // tiles are computed with these rounded matrices.
  AlignedBytes rotations;
  ElementType rotation_type = ElementType::kBf16;
  Loss loss;  // measured on rows that the trial rotation was not made from
  bool within_threshold = false;
  double block_variance = 0;  // of the chosen block length

  RotationView view() const;  // into `rotations`
};

// The average bytes per entry of a segment: whole tiles with their summaries, plus the rotations.
double BytesPerEntry(const TileShape& shape, ElementType rotation_type, std::uint64_t entries);

// `key` and `value` are the moments of all of `keys` and `values`, at least one row.
//
// Candidates are measured with a trial rotation, which is made from one half of the tiles (a sample
// of it for long segments) and tested on the other. The stored rotation is then made from all
// moments.
Strategy MakeStrategy(const LaneRows& rows, const Moments& key, const Moments& value,
                      const StrategyOptions& options, const Operations& operations);

}  // namespace tessera::kernels
