// Converts between protobuf messages and the daemon's types. Input is validated here, once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/segment/pack.h"
#include "daemon/cache/tenant/session_state.h"
#include "daemon/policies/policy.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/tile_shape.h"
#include "tessera/v1/common.pb.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

absl::StatusOr<cache::ModelSpec> ToModelSpec(const v1::ModelGeometry& geometry);

// INVALID_ARGUMENT for an unsupported type; `what` names the field.
absl::StatusOr<kernels::ElementType> ToElementType(v1::DType dtype, std::string_view what);
v1::DType ToDType(kernels::ElementType type);

// INVALID_ARGUMENT names the field and its valid values.
absl::StatusOr<kernels::SelectionRule> ToSelectionRule(const v1::Selection& selection);

// The tile shape that a packing gives the rows of a layer. `rotated`: the request has rotations.
// INVALID_ARGUMENT names the value and the limit.
absl::StatusOr<kernels::TileShape> ToTileShape(const v1::Packing& packing,
                                               const kernels::LayerGeometry& geometry,
                                               bool rotated);

void Describe(const policies::SelectionPolicy& policy, v1::PolicySelection& shown);
void Describe(const cache::SegmentRun& run, v1::SegmentRun& shown);
// Parses the policy of a request: `text`, or `spec` if not null. INVALID_ARGUMENT if both are
// given.
absl::StatusOr<policies::Policy> ToPolicy(const std::string& text, const v1::PolicySpec* spec);

// What the worker must observe for a policy; nullopt if the policy chooses no tokens.
std::optional<v1::PolicyNeeds> ToPolicyNeeds(const policies::Policy& policy);

// The number of layers that a request names; `layers` 0 means all from first_layer on.
absl::StatusOr<std::uint32_t> CountLayers(const cache::Model& model, std::uint32_t first_layer,
                                          std::uint32_t layers);
// INVALID_ARGUMENT if the layers differ in kv heads or head_dim, so that one tensor cannot hold
// them.
absl::Status CheckSameShape(const cache::Model& model, std::uint32_t first_layer,
                            std::uint32_t layers);

// The required type and shape of a tensor. A dimension of 0 may have any size above 0.
struct TensorRule {
  std::string_view name;
  kernels::ElementType type;
  std::vector<std::uint64_t> shape;
  std::string_view layout;  // "[layers][tokens][kv_heads][head_dim]", for the message
};

// The data and the actual shape of a checked tensor. Inline data belongs to the request. Staging
// data belongs to the worker, which may write to it at any time: copy it before use.
struct TensorBytes {
  device::Place place;  // kDevice: `data` is an address of the device
  const std::byte* data;
  std::vector<std::uint64_t> shape;
  std::uint64_t bytes;
};
absl::StatusOr<TensorBytes> Resolve(const v1::Tensor& tensor, const TensorRule& rule,
                                    const cache::SessionState& session);

}  // namespace tessera::serving
