// What a policy comes to for a layer.
#pragma once

#include <cstdint>
#include <optional>

#include "daemon/policies/policy.h"
#include "kernels/format/layer_geometry.h"
#include "kernels/format/tile_shape.h"

namespace tessera::policies {

// What attention reads of `layer`; nothing: everything.
std::optional<kernels::SelectionRule> SelectionOf(const Policy& policy, std::uint32_t layer);

// The form of rows that are not packed: dense, with block summaries where the policy wants them.
// Layers without a selection need none. The policy has passed CheckFor.
kernels::TileShape SummaryShape(const Policy& policy, const kernels::LayerGeometry& geometry);

// Of head_dim channels; the policy has key_channels and has passed CheckFor.
std::uint32_t KeptKeyChannels(const KeyChannelPolicy& policy, std::uint32_t head_dim);
// The form of tokens whose keys have lost the others: these, chosen by R_k, and values as they
// came, without an R_v. Nothing is kept row by row, so that there are no bitmaps.
kernels::TileShape KeyChannelShape(const KeyChannelPolicy& policy,
                                   const kernels::LayerGeometry& geometry);

}  // namespace tessera::policies
