#include "daemon/policies/plan.h"

namespace tessera::policies {
std::optional<kernels::SelectionRule> SelectionOf(const Policy& policy, std::uint32_t layer) {
  if (!policy.selection.has_value() || layer < policy.selection->dense_layers) return std::nullopt;
  return policy.selection->rule;
}

kernels::TileShape SummaryShape(const Policy& policy, const kernels::LayerGeometry& geometry) {
  kernels::TileShape shape = kernels::DenseShape(geometry.head_dim, geometry.type);
  if (policy.summaries.has_value()) {
    shape.summary = policy.summaries->summary;
    shape.block = static_cast<std::uint8_t>(policy.summaries->block);
  }
  return shape;
}

}  // namespace tessera::policies
