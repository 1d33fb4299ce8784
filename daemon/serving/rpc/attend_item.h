// One sequence of an Attend request: its query, and its lanes as they are at a pinned moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
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
  TensorBytes asked{};           // where the query is; the worker may be writing there
  std::vector<std::byte> query;  // a copy of it
  std::uint32_t queries = 0;
  std::uint64_t first_position = 0;
  std::uint64_t tokens = 0;          // that the lanes hold
  std::uint64_t position_shift = 0;  // of their positions
  std::optional<kernels::SelectionRule> rule;

  std::shared_ptr<const cache::TailHandle> tail;  // what the views point into
  std::vector<kernels::SegmentView> segments;
  std::vector<kernels::LaneView> lanes;  // of one layer, by kv head
};

// All queries of an item that has a rule share one choice, so they are computed at once.
inline constexpr std::uint32_t kMaxSelectingQueries = 256;
// What they may say of blocks, a number each: time and scratch grow with it, and no quota counts
// them.
inline constexpr std::uint64_t kMaxScores = std::uint64_t{1} << 28;

// With its rows in the pool. FAILED_PRECONDITION where the sequence has failed.
absl::StatusOr<cache::Residence> FindLive(const Caller& caller, std::uint64_t id);
// The geometry of one of its layers.
absl::StatusOr<kernels::LayerGeometry> FindLayer(const cache::Model& model, std::uint32_t layer);

// Finds the item's query and checks its size; at most `most` rows.
absl::Status FindQuery(const v1::Tensor& query, const kernels::LayerGeometry& geometry,
                       std::uint64_t most, const cache::SessionState& session, AttendItem& item);
// Copies it.
absl::Status TakeQuery(device::Device& device, AttendItem& item);
// Where the first query stands; nothing: so that the last one stands on the last token. The lanes
// have been read.
absl::Status SetPosition(std::optional<std::uint64_t> first_position, AttendItem& item);

// Reads the item's lanes; the caller has pinned. NOT_FOUND where the sequence is gone.
absl::Status ResolveLanes(cache::Tenant& tenant, std::uint32_t layer, AttendItem& item);

// INVALID_ARGUMENT where an item with a rule asks for more scores than kMaxScores. The lanes have
// been read.
absl::Status CheckScores(const kernels::LayerGeometry& geometry, const AttendItem& item);

// Reads them again for queries that come later in the same request, under another pin. ABORTED
// where the sequence has another length than the first queries saw and these would notice.
absl::Status ResolveLanesAgain(cache::Tenant& tenant, std::uint32_t layer, bool causal,
                               AttendItem& item);

}  // namespace tessera::serving
