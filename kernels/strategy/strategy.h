// A strategy for a run of one lane's entries: which rotations, how many channels of each row, in
// what groups, blocks of what length. Made from the rows themselves.
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
  // Candidates. Shares of the channels that each row keeps; rounded down to whole groups.
  std::vector<double> kept = {0.125, 0.25, 0.375};
  std::vector<std::uint32_t> groups = {1, 2, 4};
  // A candidate is good enough where both mean losses, judged on rows that its rotation was not
  // made from, are at most these. None is: the largest share, in the smallest group.
  Loss threshold = {.key = 0.10, .value = 0.15};
  // Share of the channels that are cut off, the weakest first, before rows choose. What is left is
  // a multiple of 4, rounded down.
  double truncated = 0;
  // Whether channels that rows keep together may become neighbours: they do where less is lost so.
  bool reorder = true;
  Summary summary = Summary::kMean;
  // Entries per block: the largest of these whose keys differ little enough from their mean, else
  // the smallest. Empty without a summary.
  std::vector<std::uint32_t> blocks = {4, 8, 16};
  // sum |k - mean|^2 / sum |k|^2 over a block's keys: in the mean over blocks at most this. 1 would
  // be keys whose mean says nothing.
  double block_variance = 0.5;
  ValueType values = ValueType::kBf16;
  ElementType rotation_type = ElementType::kBf16;
  // What is looked at of a run at most, spread over it, whole tiles where one fits: rows that
  // losses are judged on, that the trial rotation is made from, that say which channels go
  // together.
  std::uint64_t sampled_rows = 4096;
  std::uint64_t trial_rows = 8192;
  std::uint64_t reorder_rows = 1024;
};

struct Strategy {
  TileShape shape;  // K and V rows alike
  // R_k, then R_v, each [channels][head_dim] of `rotation_type` and RotationBytes long. Losses and
  // tiles are made with these, the stored ones.
  AlignedBytes rotations;
  ElementType rotation_type = ElementType::kBf16;
  Loss loss;  // cross-fitted
  bool within_threshold = false;
  double block_variance = 0;  // of the block length chosen

  RotationView view() const;  // into `rotations`
};

// What a row of a run costs: its whole tiles with their summaries, and the rotations, by the number
// of entries.
double BytesPerEntry(const TileShape& shape, ElementType rotation_type, std::uint64_t entries);

// `key` and `value` are the moments of all of `keys` and `values`, at least one row.
//
// Candidates are judged by a trial rotation: made from one half of the tiles (of long runs, some of
// them), judged on the other. The rotation that is stored is then made from all moments.
Strategy MakeStrategy(const LaneRows& rows, const Moments& key, const Moments& value,
                      const StrategyOptions& options, const Operations& operations);

}  // namespace tessera::kernels
