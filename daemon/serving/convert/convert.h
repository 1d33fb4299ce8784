// The border between protobuf messages and our own types: what crosses it is checked here, once.
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

// INVALID_ARGUMENT where it is none of ours; `what` names the field.
absl::StatusOr<kernels::ElementType> ToElementType(v1::DType dtype, std::string_view what);
v1::DType ToDType(kernels::ElementType type);

// What a request's selection says; INVALID_ARGUMENT where it says nothing that can be done.
absl::StatusOr<kernels::SelectionRule> ToSelectionRule(const v1::Selection& selection);

// The form that a packing gives the rows of a layer. INVALID_ARGUMENT names the value and the
// limit. `rotated`: rotations come with it.
absl::StatusOr<kernels::TileShape> ToTileShape(const v1::Packing& packing,
                                               const kernels::LayerGeometry& geometry,
                                               bool rotated);

void Describe(const policies::SelectionPolicy& policy, v1::PolicySelection& shown);
void Describe(const cache::SegmentRun& run, v1::SegmentRun& shown);
// Of a request that names a policy in words or as a message, and not as both.
absl::StatusOr<policies::Policy> ToPolicy(const std::string& text, const v1::PolicySpec* spec);

// Nothing where a policy chooses no tokens.
std::optional<v1::PolicyNeeds> ShownNeeds(const policies::Policy& policy);

// How many layers a request names by `first_layer` and `layers`, 0 being all from there on.
absl::StatusOr<std::uint32_t> CountLayers(const cache::Model& model, std::uint32_t first_layer,
                                          std::uint32_t layers);
// INVALID_ARGUMENT where they differ in kv heads or head_dim: one tensor cannot hold them then.
absl::Status CheckAlike(const cache::Model& model, std::uint32_t first_layer, std::uint32_t layers);

// What a request's tensor must look like. A dimension of 0 is free (but at least 1).
struct TensorRule {
  std::string_view name;
  kernels::ElementType type;
  std::vector<std::uint64_t> shape;
  std::string_view layout;  // "[layers][tokens][kv_heads][head_dim]", for the message
};

// The bytes of a tensor that obeys the rule, and its real shape. Inline bytes belong to the
// request; staging bytes to the worker, who may be writing there: copy before use.
struct TensorBytes {
  device::Place place;  // kDevice: `data` is an address of the device
  const std::byte* data;
  std::vector<std::uint64_t> shape;
  std::uint64_t bytes;
};
absl::StatusOr<TensorBytes> Resolve(const v1::Tensor& tensor, const TensorRule& rule,
                                    const cache::SessionState& session);

}  // namespace tessera::serving
