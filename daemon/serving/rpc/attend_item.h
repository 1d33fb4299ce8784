// One sequence of an Attend or Select request: its query, and its lanes, read while pinned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/cache/tenant/tenant.h"
#include "daemon/serving/call/caller.h"
#include "daemon/serving/convert/convert.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

struct AttendItem {
  cache::Residence sequence;
  TensorBytes asked{};  // the query in the request or staging arena; may change at any time
  std::vector<std::byte> query;  // a copy of it
  std::uint32_t queries = 0;
  std::uint64_t first_position = 0;
  std::uint64_t tokens = 0;          // held by the lanes
  std::uint64_t position_shift = 0;  // of the lanes
  std::optional<kernels::SelectionRule> rule;

  std::shared_ptr<const cache::TailHandle> tail;  // keeps the memory of the views alive
  std::vector<kernels::SegmentView> segments;
  std::vector<kernels::LaneView> lanes;  // of one layer, by kv head
};

// Queries of an item with a rule share one choice, so they are computed together.
inline constexpr std::uint32_t kMaxSelectingQueries = 256;
// Limit of queries times blocks for an item with a rule: time and scratch memory grow with it, and
// no quota covers them.
inline constexpr std::uint64_t kMaxScores = std::uint64_t{1} << 28;

// Finds a sequence and restores its rows. FAILED_PRECONDITION if the sequence has failed.
absl::StatusOr<cache::Residence> FindLive(const Caller& caller, std::uint64_t id);
// The geometry of a layer. INVALID_ARGUMENT if the model does not have it.
absl::StatusOr<kernels::LayerGeometry> FindLayer(const cache::Model& model, std::uint32_t layer);

// The element type of an answer: the layer's if `asked` is unspecified. INVALID_ARGUMENT for
// another type than the layer's or fp32; `field` is its name.
absl::StatusOr<kernels::ElementType> AnswerType(v1::DType asked, std::string_view field,
                                                const kernels::LayerGeometry& geometry);

// Locates the item's query and checks its type and shape; at most `most` rows.
absl::Status FindQuery(const v1::Tensor& query, const kernels::LayerGeometry& geometry,
                       std::uint64_t most, const cache::SessionState& session, AttendItem& item);
// Copies the query that FindQuery located.
absl::Status TakeQuery(device::Device& device, AttendItem& item);
// Sets the position of the first query. nullopt: the last query gets the position of the last
// token. Call after ResolveLanes.
absl::Status SetPosition(std::optional<std::uint64_t> first_position, AttendItem& item);

// Reads the item's lanes. The caller must hold a pin. NOT_FOUND if the sequence was freed.
absl::Status ResolveLanes(cache::Tenant& tenant, std::uint32_t layer, AttendItem& item);

// INVALID_ARGUMENT if an item with a rule needs more scores than kMaxScores. Call after
// ResolveLanes.
absl::Status CheckScores(const kernels::LayerGeometry& geometry, const AttendItem& item);

// Reads the lanes again under a new pin, for later queries of the same request. ABORTED if the
// sequence has changed in a way that these queries would see.
absl::Status ResolveLanesAgain(cache::Tenant& tenant, std::uint32_t layer, bool causal,
                               AttendItem& item);

}  // namespace tessera::serving
