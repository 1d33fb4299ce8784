#include "kernels/strategy/strategy.h"

#include <algorithm>

#include "kernels/strategy/blocks.h"
#include "kernels/strategy/candidates.h"
#include "kernels/strategy/eigen.h"
#include "kernels/strategy/float_rows.h"
#include "kernels/strategy/keeping.h"
#include "kernels/strategy/reorder.h"
#include "kernels/strategy/sample.h"
#include "kernels/strategy/stored_rotation.h"

namespace tessera::kernels {
namespace {

// One side of a lane, and how to process it.
struct Side {
  const RowSpan& rows;
  const StrategyOptions& options;
  const Operations& operations;
};

// For each number of kept channels, the channel order for rows that keep that many.
std::vector<ChannelOrder> OrdersFor(const Side& side, const std::vector<RowRange>& ranges,
                                    const StoredRotation& rotation,
                                    const std::vector<std::uint32_t>& kept) {
  if (kept.empty()) return {};
  std::vector<KeptTogetherCounts> together(kept.size(), KeptTogetherCounts(rotation.channels));
  FloatRows rotated;
  for (const RowRange& range : Spread(ranges, side.options.reorder_rows)) {
    Rotate(side.rows.Slice(range.first, range.count), rotation, side.operations, rotated);
    for (std::uint32_t r = 0; r < range.count; ++r) {
      for (std::size_t i = 0; i < kept.size(); ++i) together[i].Add(rotated.row(r), kept[i]);
    }
  }
  std::vector<ChannelOrder> orders;
  for (const KeptTogetherCounts& each : together) orders.push_back(OrderByKeptTogether(each));
  return orders;
}

bool MayReorder(const Side& side, const TileShape& shape) {
  return side.options.reorder && shape.group > 1 && shape.key.kept < shape.key.channels;
}

// One order per share; empty if no candidate may be reordered.
std::vector<ChannelOrder> TrialOrders(const Side& side, const std::vector<Candidate>& candidates,
                                      const std::vector<RowRange>& made_from,
                                      const StoredRotation& rotation) {
  std::vector<std::uint32_t> kept;
  if (std::any_of(candidates.begin(), candidates.end(),
                  [&](const Candidate& candidate) { return MayReorder(side, candidate.shape); })) {
    for (const double share : side.options.kept) {
      kept.push_back(KeptChannels(share, 1, side.rows.head_dim, rotation.channels));
    }
  }
  return OrdersFor(side, made_from, rotation, kept);
}

// A candidate's loss on one side, and whether that is with reordered channels.
struct Judgement {
  double loss = 0;
  bool reordered = false;
};

// Measures each candidate on rows that its rotation and order were not made from. Also tries the
// order of eigenvalues: if reordering gains nothing, the pair counts are noise.
std::vector<Judgement> CrossFit(const Side& side, const std::vector<Candidate>& candidates) {
  const TileShape& shape = candidates.front().shape;
  const Folds folds = SplitRows(side.rows.count);
  Moments moments(side.rows.head_dim);
  for (const RowRange& range : Spread(folds.made_from, side.options.trial_rows)) {
    moments.Add(side.rows.Slice(range.first, range.count), side.operations);
  }
  AlignedBytes matrix(RotationBytes(shape, shape.key, side.options.rotation_type));
  const StoredRotation rotation = StoreRotation(Decompose(moments), {}, shape.key.channels,
                                                side.options.rotation_type, matrix.data());
  const std::vector<ChannelOrder> orders = TrialOrders(side, candidates, folds.made_from, rotation);
  std::vector<Keeping> ways;
  for (const Candidate& candidate : candidates) {
    const Keeping keeping = {.kept = candidate.shape.key.kept, .group = candidate.shape.group};
    ways.push_back(keeping);
    if (!MayReorder(side, candidate.shape)) continue;
    ways.push_back(keeping);
    ways.back().order = &orders[candidate.share];
  }
  const std::vector<double> losses =
      MeanLosses(side.rows, Spread(folds.judged_on, side.options.sampled_rows), rotation, ways,
                 side.operations);
  std::vector<Judgement> judgements;
  for (std::size_t way = 0; way < ways.size(); ++way) {
    if (ways[way].order == nullptr) {
      judgements.push_back({.loss = losses[way]});
    } else if (losses[way] < judgements.back().loss) {
      judgements.back() = {.loss = losses[way], .reordered = true};
    }
  }
  return judgements;
}

// Writes the rotation that tiles of this shape are encoded with.
void StoreFinalRotation(const Side& side, const Moments& moments, const TileShape& shape,
                        bool reordered, std::byte* matrix) {
  const ElementType type = side.options.rotation_type;
  const Eigenbasis basis = Decompose(moments);
  const StoredRotation rotation = StoreRotation(basis, {}, shape.key.channels, type, matrix);
  if (!reordered) return;
  // Near-equal eigenvalues may be ordered differently than in the trial, so pairs are counted
  // again.
  const ChannelOrder order =
      OrdersFor(side, TilesOf(side.rows.count), rotation, {shape.key.kept}).front();
  StoreRotation(basis, order, shape.key.channels, type, matrix);
}

}  // namespace

RotationView Strategy::view() const {
  return {.key = rotations.data(),
          .value = rotations.data() + RotationBytes(shape, shape.key, rotation_type),
          .type = rotation_type};
}

double BytesPerEntry(const TileShape& shape, ElementType rotation_type, std::uint64_t entries) {
  const std::uint64_t tiles = (entries + kTileEntries - 1) / kTileEntries;
  const std::uint64_t rotations = shape.packed() ? RotationBytes(shape, rotation_type) : 0;
  return static_cast<double>(tiles * TileAndSummaryBytes(LayoutOf(shape)) + rotations) /
         static_cast<double>(entries);
}

Strategy MakeStrategy(const LaneRows& rows, const Moments& key, const Moments& value,
                      const StrategyOptions& options, const Operations& operations) {
  const BlockChoice block = ChooseBlock(rows.keys, options, operations);
  std::vector<Candidate> candidates =
      ListCandidates(rows.keys.head_dim, rows.keys.count, block.block, options);
  const Side keys = {rows.keys, options, operations};
  const Side values = {rows.values, options, operations};
  const std::vector<Judgement> of_keys = CrossFit(keys, candidates);
  const std::vector<Judgement> of_values = CrossFit(values, candidates);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    candidates[i].loss = {.key = of_keys[i].loss, .value = of_values[i].loss};
  }
  const std::size_t choice = ChooseCandidate(candidates, options.threshold);
  const Candidate& chosen = candidates[choice];

  Strategy strategy = {
      .shape = chosen.shape,
      .rotations = AlignedBytes(RotationBytes(chosen.shape, options.rotation_type)),
      .rotation_type = options.rotation_type,
      .loss = chosen.loss,
      .within_threshold = IsWithin(chosen.loss, options.threshold),
      .block_variance = block.variance};
  StoreFinalRotation(keys, key, chosen.shape, of_keys[choice].reordered, strategy.rotations.data());
  StoreFinalRotation(values, value, chosen.shape, of_values[choice].reordered,
                     strategy.rotations.data() +
                         RotationBytes(chosen.shape, chosen.shape.key, options.rotation_type));
  return strategy;
}

}  // namespace tessera::kernels
