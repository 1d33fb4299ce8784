// What the worker has shown, or FAILED_PRECONDITION with what it has not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/base/strings.h"
#include "daemon/policies/token_policy.h"
#include "kernels/tokens/attention.h"

namespace tessera::policies {

// The call by which the worker shows it; messages name it.
inline constexpr std::string_view kShowingCall = "Observe";

absl::Status Missing(std::string_view system, std::string_view what);

struct ShownQueries {
  std::span<const std::uint64_t> positions;
  kernels::RowRange rows;

  ShownQueries Part(std::uint64_t begin, std::uint64_t count, std::size_t row_bytes) const {
    return {.positions = positions.subspan(begin, count),
            .rows = {.rows = rows.rows + begin * row_bytes, .count = count}};
  }
};

// All of a query head's.
absl::StatusOr<ShownQueries> QueriesOf(std::string_view system, const LayerView& view,
                                       std::uint32_t head);
// Those of the newest `count` tokens; the sequence has so many.
absl::StatusOr<ShownQueries> NewestQueries(std::string_view system, const LayerView& view,
                                           std::uint32_t head, std::uint64_t count);
absl::StatusOr<ShownQueries> QueryAt(std::string_view system, const LayerView& view,
                                     std::uint32_t head, std::uint64_t position);

std::size_t RowBytes(const LayerView& view);

// What these queries pay to each entry that they see, not being younger than they are: added to
// `sums`, one for each entry of the lane.
absl::Status AddShares(const LayerView& view, std::uint32_t kv_head, const ShownQueries& queries,
                       std::span<double> sums);

// What the queries at `position`, of all heads that read the lane, pay to `seen` ones among its
// first entries, up to `newest`, and in reach of the layer's sliding window: times `weight` it is
// added to `paid`, one for each of `seen`.
absl::Status AddSharesAt(std::string_view system, const LayerView& view, std::uint32_t kv_head,
                         std::uint64_t position, std::uint32_t newest,
                         std::span<const std::uint32_t> seen, double weight,
                         std::span<double> paid);

// The same of entries [first, end), which came in one forward step: what their queries pay to
// `seen` ones before them and to each other, to which `paid` goes in this order. In fp32, at once.
absl::Status AddSharesOfStep(std::string_view system, const LayerView& view, std::uint32_t kv_head,
                             std::uint64_t first, std::uint64_t end,
                             std::span<const std::uint32_t> seen, double weight,
                             std::span<double> paid);

// FAILED_PRECONDITION where lanes differ, so that no decision could hold for all of them.
absl::Status CheckEqualCounts(std::string_view system, const LayerView& view);
absl::Status CheckEqualLanes(std::string_view system, const LayerView& view);  // positions, too

}  // namespace tessera::policies
