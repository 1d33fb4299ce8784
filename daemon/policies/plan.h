// Derives the settings of a layer from a policy.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "daemon/policies/policy.h"
#include "kernels/format/layer_geometry.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/book.h"

namespace tessera::policies {

// The selection rule of a layer; nullopt: attention reads every entry.
std::optional<kernels::SelectionRule> SelectionOf(const Policy& policy, std::uint32_t layer);

// The shape of unpacked rows: dense, with block summaries if the policy has them. The policy must
// have passed CheckFor.
kernels::TileShape SummaryShape(const Policy& policy, const kernels::LayerGeometry& geometry);

// How many of `head_dim` key channels are kept. The policy must have passed CheckFor.
std::uint32_t KeptKeyChannels(const KeyChannelPolicy& policy, std::uint32_t head_dim);
// The shape of rows with dropped key channels: R_k picks the kept channels, values are whole and
// have no R_v. All rows keep the same channels, so there are no bitmaps.
kernels::TileShape KeyChannelShape(const KeyChannelPolicy& policy,
                                   const kernels::LayerGeometry& geometry);

// What rows become that are coded with a book, and which rows do.
struct BookPlan {
  kernels::TileShape shape;
  kernels::BookPlanes planes;   // of the book
  std::uint64_t sinks = 0;      // first tokens of a lane that stay as they are, in whole tiles
  std::uint64_t recent = 0;     // newest tokens that stay as they are
  std::uint64_t book_rows = 0;  // rows of a lane that its book is made from
  std::string book{kAutoBook};  // as in PlanesPolicy

  bool has_book_of_file() const { return book != kAutoBook && book != kOwnBook; }
};
// The policy must use books, and have passed CheckFor.
BookPlan BookPlanOf(const Policy& policy, const kernels::LayerGeometry& geometry);
// "6|4", as users write widths.
std::string WidthsText(const kernels::PlaneWidths& widths);

}  // namespace tessera::policies
