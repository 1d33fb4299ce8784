// Access to what the worker has observed of a prompt. Functions return FAILED_PRECONDITION, and
// name what is missing, if it has not been observed.
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

// The RPC that sends observations, for error messages.
inline constexpr std::string_view kObserveCall = "Observe";

absl::Status Missing(std::string_view system, std::string_view what);

struct ObservedQueries {
  std::span<const std::uint64_t> positions;
  kernels::RowRange rows;

  ObservedQueries Part(std::uint64_t begin, std::uint64_t count, std::size_t row_bytes) const {
    return {.positions = positions.subspan(begin, count),
            .rows = {.rows = rows.rows + begin * row_bytes, .count = count}};
  }
};

// All observed queries of a query head.
absl::StatusOr<ObservedQueries> QueriesOf(std::string_view system, const LayerView& view,
                                          std::uint32_t head);
// The queries of the newest `count` tokens. The view must have that many.
absl::StatusOr<ObservedQueries> NewestQueries(std::string_view system, const LayerView& view,
                                              std::uint32_t head, std::uint64_t count);
absl::StatusOr<ObservedQueries> QueryAt(std::string_view system, const LayerView& view,
                                        std::uint32_t head, std::uint64_t position);

std::size_t RowBytes(const LayerView& view);

// Adds the attention that these queries pay to the entries of a lane. Attention is causal. `sums`
// has one value per entry.
absl::Status AddShares(const LayerView& view, std::uint32_t kv_head, const ObservedQueries& queries,
                       std::span<double> sums);

// Adds, times `weight`, the attention that the queries at `position` pay to the entries `seen`,
// summed over all query heads of the lane. `seen` are indices of entries up to `newest`. Only
// entries in the layer's sliding window receive attention. `paid` has one value per entry of
// `seen`.
absl::Status AddSharesAt(std::string_view system, const LayerView& view, std::uint32_t kv_head,
                         std::uint64_t position, std::uint32_t newest,
                         std::span<const std::uint32_t> seen, double weight,
                         std::span<double> paid);

// The same for entries [first, end), which came in one forward step: the attention of their queries
// to the earlier entries `seen` and to each other. `paid` has the values of `seen` first, then
// those of [first, end). Computed by one look, in fp32.
absl::Status AddSharesOfStep(std::string_view system, const LayerView& view, std::uint32_t kv_head,
                             std::uint64_t first, std::uint64_t end,
                             std::span<const std::uint32_t> seen, double weight,
                             std::span<double> paid);

// FAILED_PRECONDITION if the lanes differ, so that one decision cannot hold for all of them.
absl::Status CheckEqualCounts(std::string_view system, const LayerView& view);
absl::Status CheckEqualLanes(std::string_view system, const LayerView& view);  // positions, too

}  // namespace tessera::policies
