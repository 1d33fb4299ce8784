// Derives the settings of a layer from a policy.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "daemon/policies/policy.h"
#include "kernels/format/layer_geometry.h"
#include "kernels/format/tile_shape.h"

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

// The shape of rows as codes. The policy must have passed CheckFor.
kernels::TileShape PlanesShape(const PlanesPolicy& policy, std::uint32_t head_dim);
// "6|4", as users write widths.
std::string WidthsText(const kernels::PlaneWidths& widths);

}  // namespace tessera::policies
