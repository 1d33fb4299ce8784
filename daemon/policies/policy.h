// How a sequence's KV is compressed and read: which tokens and channels are kept, which blocks are
// summarized, and what attention reads. Plain data: parse.h builds it from text, validate.h checks
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/policies/token_options.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/strategy.h"

namespace tessera::policies {

// Where lanes are cut into segments, each with its own strategy. In tokens.
struct SegmentOptions {
  std::uint64_t tokens = 65536;     // largest segment
  std::uint64_t min_tokens = 4096;  // smallest segment that is cut while decoding
  std::uint64_t sinks = 4;          // first tokens of a lane that stay dense, in whole tiles
  std::uint64_t recent = 128;       // newest tokens that stay dense
  std::uint64_t loss_window = 512;  // newest tokens whose mean loss is monitored
  // The segment is cut when that loss exceeds the strategy's threshold by more than this.
  kernels::Loss margin = {.key = 0.05, .value = 0.05};
};

// Packs rows, segment by segment (MosaicKV). The strategy defines the block summaries; with Quest
// they are min/max, in blocks of one size.
struct MosaicPolicy {
  kernels::StrategyOptions strategy = {.blocks = {8}, .values = kernels::ValueType::kInt8};
  SegmentOptions segments;
  // When memory is short, segments may be reduced to this share of the channels; 0: never.
  double pressed = 0;
};

// The daemon makes a book per lane of a model and tenant, or one for each segment.
inline constexpr std::string_view kAutoBook = "auto";
inline constexpr std::string_view kOwnBook = "own";

// Stores rows as integer codes of a few bits (kernels/format/planes.h), coded with a book: a mean
// and a rotation for each lane of the model.
struct PlanesPolicy {
  kernels::PlaneWidths key = {6, 4};
  kernels::PlaneWidths value = {4, 0};
  std::uint64_t sinks = 4;         // first tokens of a lane that stay dense, in whole tiles
  std::uint64_t recent = 64;       // newest tokens that stay dense
  std::uint64_t book_rows = 1024;  // dense rows of a lane that its book is made from
  // Where books come from: kAutoBook, kOwnBook, or the name of a file's book.
  std::string book{kAutoBook};

  // Under memory pressure, whether the lower two bits of 6-bit codes of keys may be dropped.
  bool drops_crumbs = false;

  bool has_book_of_file() const { return book != kAutoBook && book != kOwnBook; }
};

// Drops key channels, the same ones from every token but the newest; values are unchanged (ThinK).
// Each kv head chooses its channels at the end of a prompt.
struct KeyChannelPolicy {
  double ratio = 0.4;         // share of channels to drop, rounded down
  std::uint64_t recent = 32;  // newest tokens, which keep all channels
  std::uint32_t window = 32;  // newest queries, which score the channels
  // The type of rows with dropped channels; nullopt: the layer's type.
  std::optional<kernels::ValueType> values;
};

// Summarizes blocks of unpacked rows (Quest without mosaickv).
struct SummaryPolicy {
  kernels::Summary summary = kernels::Summary::kMinMax;
  std::uint32_t block = 16;
};

struct SelectionPolicy {
  kernels::SelectionRule rule;
  std::uint32_t dense_layers = 0;  // first layers in which attention reads everything
};

struct Policy {
  std::string text = "dense";          // canonical; parses to an equal policy
  std::optional<TokenPolicy> tokens;   // which tokens are kept; nullopt: all
  std::optional<TokenPolicy> merging;  // which kept tokens are merged; nullopt: none
  // At most one of these four is set.
  std::optional<MosaicPolicy> mosaic;
  std::optional<PlanesPolicy> planes;
  std::optional<KeyChannelPolicy> key_channels;
  std::optional<SummaryPolicy> summaries;
  // Keys are indexed by their signs (kernels/format/planes.h), which `selection` chooses by: of
  // rows in planes, or without `planes` of dense rows.
  bool signs = false;
  std::optional<SelectionPolicy> selection;  // nullopt: attention reads everything

  // Whether entries are dropped or merged.
  bool drops_entries() const { return tokens.has_value() || merging.has_value(); }
  // Whether all rows are stored uncompressed and without summaries.
  bool dense() const {
    return !drops_entries() && !mosaic.has_value() && !planes.has_value() &&
           !key_channels.has_value() && !summaries.has_value() && !signs;
  }
  // Whether rows are coded with the book of their lane: in planes, or dense with an index of signs.
  bool uses_books() const { return planes.has_value() || signs; }
  // What says which rows get codes or an index. Dense rows with signs have the book of the default
  // planes, and more newest rows that are always read.
  PlanesPolicy book_options() const { return planes.value_or(PlanesPolicy{.recent = 128}); }
  // Whether rows that are stored already may become smaller when memory is short.
  bool yields_to_pressure() const {
    return (mosaic.has_value() && mosaic->pressed > 0) ||
           (planes.has_value() && planes->drops_crumbs);
  }
  // Whether tokens or channels are chosen layer by layer, mostly from the worker's observations.
  bool chooses() const { return drops_entries() || key_channels.has_value(); }
};

}  // namespace tessera::policies
