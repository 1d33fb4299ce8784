// One sequence of an Attend request: its query, and its lanes as they are at a pinned moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/sequence.h"
#include "daemon/cache/tenant.h"
#include "daemon/serving/convert.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

struct AttendItem {
  std::shared_ptr<cache::Sequence> sequence;
  TensorBytes asked{};           // where the query is; the worker may be writing there
  std::vector<std::byte> query;  // a copy of it
  std::uint32_t queries = 0;
  std::uint64_t first_position = 0;
  std::uint64_t tokens = 0;  // that the lanes hold

  std::shared_ptr<const cache::TailHandle> tail;  // what the views point into
  std::vector<kernels::SegmentView> segments;
  std::vector<kernels::LaneView> lanes;  // of one layer, by kv head
};

// Reads the item's lanes; the caller has pinned. NOT_FOUND where the sequence is gone.
absl::Status ResolveLanes(cache::Tenant& tenant, std::uint32_t layer, AttendItem& item);

// Reads them again for queries that come later in the same request, under another pin. ABORTED
// where the sequence has another length than the first queries saw and these would notice.
absl::Status ResolveLanesAgain(cache::Tenant& tenant, std::uint32_t layer, bool causal,
                               AttendItem& item);

}  // namespace tessera::serving
