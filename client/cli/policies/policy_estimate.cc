#include "client/cli/policies/policy_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/validate.h"
#include "daemon/policies/least_tokens.h"
#include "daemon/policies/plan.h"
#include "daemon/policies/tokens/kept_tokens.h"
#include "kernels/strategy/candidates.h"

namespace tessera::cli {

namespace {

using kernels::kTileEntries;
using kernels::TileShape;

std::uint64_t FullTiles(std::uint64_t entries) { return entries / kTileEntries * kTileEntries; }

Range operator+(const Range& a, const Range& b) {
  return {.least = a.least + b.least, .most = a.most + b.most};
}

// The pool rounds a tile up to this, and pieces of one or more tiles' summaries.
std::uint64_t Rounded(std::uint64_t bytes) {
  constexpr std::uint64_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Pool bytes of entries of one lane that are stored in this shape, in whole tiles.
Range BytesOf(const TileShape& shape, std::uint64_t entries) {
  const std::uint64_t tiles = (entries + kTileEntries - 1) / kTileEntries;
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  return {.least = tiles * (Rounded(layout.bytes) + layout.summary_bytes),
          .most = tiles * (Rounded(layout.bytes) + Rounded(layout.summary_bytes))};
}

// The estimate of one lane.
class Lane {
 public:
  Lane(const policies::Policy& policy, const ModelShape& model, PolicyEstimate& estimate)
      : policy_(policy), model_(model), estimate_(estimate) {}

  Range Bytes(std::uint64_t least, std::uint64_t most) {
    if (least == most) return BytesOfEntries(most);
    return {.least = BytesOfEntries(least).least, .most = BytesOfEntries(most).most};
  }

 private:
  Range BytesOfEntries(std::uint64_t entries) {
    dropped_ = entries < estimate_.tokens;
    if (policy_.mosaic.has_value()) return Packed(entries);
    if (policy_.uses_books()) return WithBook(entries);
    if (policy_.key_channels.has_value()) return Reduced(entries);
    return Dense(entries);
  }

  // Unpacked rows, with the positions of rows that are not consecutive. Block summaries are added
  // in the background.
  Range Dense(std::uint64_t entries) const {
    const kernels::LayerGeometry& geometry = model_.geometry;
    const TileShape plain = WithGaps(kernels::DenseShape(geometry.head_dim, geometry.type));
    return {.least = BytesOf(plain, entries).least,
            .most = BytesOf(WithGaps(policies::SummaryShape(policy_, geometry)), entries).most};
  }
  TileShape WithGaps(TileShape shape) const {
    shape.positions = dropped_;
    shape.weights = dropped_ && policy_.merging.has_value();
    return shape;
  }

  // Whole tiles in planes or with signs, between dense sinks and newest entries. The books of a
  // model's lanes are counted once for all of its sequences, and not here.
  Range WithBook(std::uint64_t entries) {
    const policies::BookPlan plan = policies::BookPlanOf(policy_, model_.geometry);
    const std::uint64_t sinks = std::min(FullTiles(plan.sinks + kTileEntries - 1), entries);
    const std::uint64_t older = entries - std::min(entries, plan.recent);
    const std::uint64_t coded = FullTiles(older - std::min(older, sinks));
    if (coded == 0) {
      Note(Concat("nothing is coded: the policy keeps the first ", sinks, " and the newest ",
                  plan.recent, " entries of a lane dense"));
      return Dense(entries);
    }
    if (plan.book == policies::kOwnBook) {
      if (coded < plan.book_rows) {
        Note(Concat("rows stay dense until a sequence has ", plan.book_rows,
                    " older entries, from which a segment's book is made"));
      }
      Note("each segment has a book of its own, which is not counted here");
    } else if (!plan.has_book_of_file() && coded < plan.book_rows) {
      Note(Concat("rows stay dense until a sequence of the model has ", plan.book_rows,
                  " older entries, from which the model's books are made"));
    }
    estimate_.packed = std::max(estimate_.packed, coded);
    return Dense(sinks) + Dense(entries - sinks - coded) + BytesOf(WithGaps(plan.shape), coded);
  }

  // Packed by mosaickv: bytes of the smallest and of the largest candidate.
  Range Packed(std::uint64_t entries) {
    const policies::SegmentOptions& segments = policy_.mosaic->segments;
    std::uint64_t older = entries;
    std::uint64_t sinks = 0;
    if (!policy_.drops_entries()) {
      if (segments.recent != 0) older = FullTiles(entries - std::min(entries, segments.recent));
      sinks = std::min(FullTiles(segments.sinks + kTileEntries - 1), older);
    }
    const std::uint64_t packed = older - sinks;
    if (packed == 0) {
      Note(Concat("nothing is packed: the policy keeps the first ", sinks, " and the newest ",
                  segments.recent, " entries of a lane dense"));
      return Dense(entries);
    }
    Range all = Dense(sinks) + Dense(entries - older);
    for (std::uint64_t done = 0; done < packed; done += segments.tokens) {
      const std::uint64_t count = std::min(segments.tokens, packed - done);
      const bool is_short = count < std::min(segments.min_tokens, segments.tokens);
      all = all + (is_short ? ShortEnd(count, /*after_another=*/done > 0) : Segment(count));
    }
    estimate_.packed = std::max(estimate_.packed, packed);
    return all;
  }

  // Of the smallest and the largest candidate, without rotations.
  Range Candidates(std::uint64_t entries, Range& rotations) const {
    const kernels::StrategyOptions& strategy = policy_.mosaic->strategy;
    std::vector<std::uint32_t> blocks = strategy.blocks;
    if (blocks.empty()) blocks.push_back(0);
    Range tiles = {.least = std::numeric_limits<std::uint64_t>::max(), .most = 0};
    rotations = tiles;
    for (const std::uint32_t block : blocks) {
      for (const kernels::Candidate& candidate :
           kernels::ListCandidates(model_.geometry.head_dim, entries, block, strategy)) {
        const Range bytes = BytesOf(WithGaps(candidate.shape), entries);
        const std::uint64_t rotation =
            kernels::RotationBytes(candidate.shape, strategy.rotation_type);
        tiles = {.least = std::min(tiles.least, bytes.least),
                 .most = std::max(tiles.most, bytes.most)};
        rotations = {.least = std::min(rotations.least, rotation),
                     .most = std::max(rotations.most, rotation)};
      }
    }
    return tiles;
  }

  Range Segment(std::uint64_t entries) {
    Range rotations;
    const Range bytes = Candidates(entries, rotations) + rotations;
    const kernels::Loss& most = policy_.mosaic->strategy.threshold;
    Note(
        Concat("the share of channels is chosen per lane: the smallest of keep whose loss is at "
               "most loss_k ",
               most.key, " and loss_v ", most.value, "; if none is, the largest"));
    if (bytes.least >= Dense(entries).least) {
      Note(Concat("a segment of ", entries,
                  " entries with its rotations is larger than dense rows; raise min_segment"));
    }
    return bytes;
  }

  // The end of a prompt that is shorter than min_segment: its own strategy, the one of the segment
  // before it, or dense.
  Range ShortEnd(std::uint64_t entries, bool after_another) {
    const policies::SegmentOptions& segments = policy_.mosaic->segments;
    const Range dense = Dense(entries);
    Range rotations;
    const Range tiles = Candidates(entries, rotations);
    const std::uint64_t least = tiles.least + (after_another ? 0 : rotations.least);
    if (least >= dense.least) {
      Note(Concat("a segment of ", entries,
                  " entries with its rotations would be larger than dense rows, and stays dense"));
      return dense;
    }
    const kernels::Loss& most = policy_.mosaic->strategy.threshold;
    Note(Concat("a segment of ", entries, " entries is shorter than min_segment ",
                segments.min_tokens, ": lanes whose loss exceeds loss_k ", most.key, " or loss_v ",
                most.value,
                " with every keep stay dense. Raise these limits or keep, or lower min_segment"));
    return {.least = least, .most = dense.most};
  }

  // Key channels dropped from all but the newest entries (think).
  Range Reduced(std::uint64_t entries) const {
    const policies::KeyChannelPolicy& channels = *policy_.key_channels;
    const TileShape shape = policies::KeyChannelShape(channels, model_.geometry);
    const std::uint64_t reduced = FullTiles(entries - std::min(entries, channels.recent));
    if (reduced == 0) return Dense(entries);
    const std::uint64_t rotation = kernels::RotationBytes(shape, shape.key, model_.geometry.type);
    return BytesOf(WithGaps(shape), reduced) + Dense(entries - reduced) +
           Range{.least = rotation, .most = rotation};
  }

  void Note(std::string text) {
    auto& notes = estimate_.obstacles;
    if (std::ranges::find(notes, text) == notes.end()) notes.push_back(std::move(text));
  }

  const policies::Policy& policy_;
  const ModelShape& model_;
  PolicyEstimate& estimate_;
  bool dropped_ = false;  // entries of the lane are dropped or merged
};

void NoteTokens(const policies::Policy& policy, std::uint64_t tokens, PolicyEstimate& estimate) {
  const std::uint64_t whole = policies::KeepsUpTo(policy);
  if (whole != 0 && tokens <= whole) {
    estimate.obstacles.push_back(
        Concat("prompts of up to ", whole, " tokens are kept whole; this one has ", tokens));
  }
  if (policy.drops_entries() && estimate.kept.least != estimate.kept.most) {
    estimate.obstacles.push_back(
        Concat("how many entries remain depends on the text and the keys"));
  }
  if (!estimate.needs.empty()) {
    estimate.obstacles.push_back(Concat("until the worker has sent its observations (",
                                        estimate.needs, "), prompts wait uncompressed"));
  }
}

// Entries of a lane that a decode step reads.
std::uint64_t ReadOf(const policies::Policy& policy, std::uint64_t entries) {
  if (!policy.selection.has_value()) return 0;
  const kernels::SelectionRule& rule = policy.selection->rule;
  const std::uint64_t budget =
      rule.entries != 0
          ? rule.entries
          : std::max<std::uint64_t>(
                static_cast<std::uint64_t>(std::ceil(rule.rate * static_cast<double>(entries))),
                rule.floor);
  return budget < entries ? budget : 0;
}

}  // namespace

absl::StatusOr<PolicyEstimate> EstimatePolicy(const policies::Policy& policy,
                                              const ModelShape& model, std::uint64_t tokens) {
  absl::Status fits = policies::CheckFor(policy, model.geometry);
  if (fits.ok()) {
    fits =
        policies::CheckForModel(policy, {.layers = model.layers, .delimiters = model.delimiters});
  }
  if (!fits.ok()) return fits;
  PolicyEstimate estimate = {.policy = policy.text, .tokens = tokens};
  const kernels::LayerGeometry& geometry = model.geometry;
  estimate.dense_bytes =
      model.lanes() * BytesOf(kernels::DenseShape(geometry.head_dim, geometry.type), tokens).most;
  const policies::Needs needs = policies::NeedsOf(policy);
  if (!(needs == policies::Needs())) estimate.needs = policies::NeedsText(needs);
  absl::StatusOr<policies::KeptTokens> kept = policies::KeptTokensOf(policy, tokens);
  if (!kept.ok()) {
    // The prompt waits, as it is, for more tokens.
    estimate.obstacles.emplace_back(AsStringView(kept.status().message()));
    kept = policies::KeptTokens{.least = tokens, .most = tokens};
  }
  estimate.kept = {.least = kept->least, .most = kept->most};
  const Range lane = Lane(policy, model, estimate).Bytes(kept->least, kept->most);
  estimate.bytes = {.least = lane.least * model.lanes(), .most = lane.most * model.lanes()};
  estimate.read = ReadOf(policy, kept->most);
  NoteTokens(policy, tokens, estimate);
  return estimate;
}

}  // namespace tessera::cli
