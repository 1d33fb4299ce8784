#include "daemon/policies/plan.h"

#include "daemon/base/strings.h"

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

std::uint32_t KeptKeyChannels(const KeyChannelPolicy& policy, std::uint32_t head_dim) {
  // head_dim is a power of two: the product is exact.
  return head_dim - static_cast<std::uint32_t>(policy.ratio * head_dim);
}

kernels::TileShape KeyChannelShape(const KeyChannelPolicy& policy,
                                   const kernels::LayerGeometry& geometry) {
  const auto own = static_cast<kernels::ValueType>(geometry.type);
  kernels::TileShape shape = kernels::DenseShape(geometry.head_dim, geometry.type);
  shape.format = kernels::PackedFormat(policy.values.value_or(own));
  const auto kept = static_cast<std::uint16_t>(KeptKeyChannels(policy, geometry.head_dim));
  shape.key = {.channels = kept, .kept = kept};
  return shape;
}

BookPlan BookPlanOf(const Policy& policy, const kernels::LayerGeometry& geometry) {
  const PlanesPolicy planes = policy.book_options();
  BookPlan plan = {.shape = policy.planes.has_value()
                                ? kernels::PlanesShape(geometry.head_dim, planes.key, planes.value)
                                : kernels::DenseShape(geometry.head_dim, geometry.type),
                   .planes = {.key = planes.key.planes(), .value = planes.value.planes()},
                   .sinks = planes.sinks,
                   .recent = planes.recent,
                   .book_rows = planes.book_rows,
                   .book = planes.book};
  if (policy.signs) plan.shape = kernels::WithSigns(plan.shape);
  return plan;
}

std::string WidthsText(const kernels::PlaneWidths& widths) {
  if (widths.planes() < 2) return std::to_string(widths.first);
  return Concat(widths.first + 0, "|", widths.second + 0);
}

static_assert(static_cast<int>(kernels::ValueType::kBf16) ==
                  static_cast<int>(kernels::ElementType::kBf16) &&
              static_cast<int>(kernels::ValueType::kFp16) ==
                  static_cast<int>(kernels::ElementType::kFp16));

}  // namespace tessera::policies
