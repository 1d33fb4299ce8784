// What is done with a sequence's KV: which tokens stay, which channels their rows keep, what blocks
// are summed up, which of them attention reads. Plain data; parse.h makes it from words, validate.h
// says what is wrong.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "daemon/policies/token_options.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/strategy.h"

namespace tessera::policies {

// Where lanes are cut into segments, each with a strategy of its own. In tokens.
struct SegmentOptions {
  std::uint64_t tokens = 65536;     // of a segment at most
  std::uint64_t min_tokens = 4096;  // of one that is cut while decoding
  std::uint64_t sinks = 4;          // the first tokens of a lane, which stay dense, in whole tiles
  std::uint64_t recent = 128;       // the newest tokens, which stay dense
  std::uint64_t loss_window = 512;  // newest tokens whose mean loss is watched
  // By how much that may exceed the strategy's threshold before the segment is cut.
  kernels::Loss margin = {.key = 0.05, .value = 0.05};
};

// Rows are packed, segment by segment (MosaicKV). The summaries of blocks are the strategy's;
// beside Quest they are min/max, in blocks of one size.
struct MosaicPolicy {
  kernels::StrategyOptions strategy = {.blocks = {8}, .values = kernels::ValueType::kInt8};
  SegmentOptions segments;
  // Where memory is short segments may be cut down to this share of the channels; 0: never.
  double pressed = 0;
};

// Keys lose the same channels in every token but the newest, values none (ThinK). Which ones each
// kv head finds at the end of a prompt.
struct KeyChannelPolicy {
  double ratio = 0.4;         // of the channels go, rounded down
  std::uint64_t recent = 32;  // of the newest tokens none goes
  std::uint32_t window = 32;  // the newest queries, which judge
  // The type of rows that have lost some; nothing: the layer's.
  std::optional<kernels::ValueType> values;
};

// Rows stay as they are and their blocks are summed up (Quest alone).
struct SummaryPolicy {
  kernels::Summary summary = kernels::Summary::kMinMax;
  std::uint32_t block = 16;
};

struct SelectionPolicy {
  kernels::SelectionRule rule;
  std::uint32_t dense_layers = 0;  // the first layers, which read everything
};

struct Policy {
  std::string text = "dense";  // in its canonical form: every policy has one, and it parses to this
  std::optional<TokenPolicy> tokens;   // which of them stay; nothing: all
  std::optional<TokenPolicy> merging;  // which of those become one; nothing: none
  // At most one of these three.
  std::optional<MosaicPolicy> mosaic;
  std::optional<KeyChannelPolicy> key_channels;
  std::optional<SummaryPolicy> summaries;
  std::optional<SelectionPolicy> selection;  // nothing: everything is read

  // Whether entries go.
  bool drops_entries() const { return tokens.has_value() || merging.has_value(); }
  // Rows stay, as they are.
  bool dense() const {
    return !drops_entries() && !mosaic.has_value() && !key_channels.has_value() &&
           !summaries.has_value();
  }
  // Whether something is chosen layer by layer, of what was shown: tokens, or channels.
  bool chooses() const { return drops_entries() || key_channels.has_value(); }
};

}  // namespace tessera::policies
