// Splits items whose selection rule sets `each_head` by query head, and with `each_query` by query.
//
// Kernels make one choice of blocks per kv head and item. To get one per query head, the caller
// passes a layer without groups: every query head becomes a kv head whose lane is that of its
// group. One batch may contain both kinds of items; it is run as two kernel batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/dispatch/attend.h"

namespace tessera::kernels {

// The same rows, with each query head as its own kv head.
constexpr LayerGeometry WithoutGroups(LayerGeometry geometry) {
  geometry.kv_heads = geometry.query_heads;
  return geometry;
}

class PerHeadItems {
 public:
  // Keeps the allocated memory.
  void Clear() {
    shared_.clear();
    apart_.clear();
  }
  // `whole.items` is ignored.
  void Add(const AttendBatch& whole, const AttendItem& item) {
    if (item.selection == nullptr || !item.selection->each_query) {
      return AddHeads(whole.geometry, item);
    }
    for (std::uint32_t query = 0; query < item.queries; ++query) {
      AddHeads(whole.geometry, QueryOf(whole, item, query));
    }
  }

  // Calls run(batch) for the shared items, then for the per-head items, skipping an empty list.
  // Stops at the first answer that fails `good`; returns the last answer. At least one item must
  // have been added; `whole.items` is ignored.
  template <class Run, class Good>
  auto ForEachBatch(const AttendBatch& whole, Run run, Good good) const {
    AttendBatch batch = whole;
    batch.items = shared_;
    if (!shared_.empty()) {
      auto answer = run(batch);
      if (apart_.empty() || !good(answer)) return answer;
    }
    batch.geometry = WithoutGroups(whole.geometry);
    batch.items = apart_;
    return run(batch);
  }

 private:
  static AttendItem QueryOf(const AttendBatch& whole, const AttendItem& item, std::uint32_t query) {
    const std::uint32_t heads = whole.geometry.query_heads;
    const std::size_t elements = std::size_t{query} * heads * whole.geometry.head_dim;
    AttendItem one = item;
    one.queries = 1;
    one.first_query_position += query;
    one.query =
        static_cast<const std::byte*>(item.query) + elements * ElementBytes(whole.geometry.type);
    if (item.output != nullptr) {
      one.output =
          static_cast<std::byte*>(item.output) + elements * ElementBytes(whole.output_type);
    }
    if (item.lse != nullptr) one.lse = item.lse + std::size_t{query} * heads;
    return one;
  }
  void AddHeads(const LayerGeometry& geometry, const AttendItem& item) {
    if (item.selection == nullptr || !item.selection->each_head) {
      shared_.push_back(item);
      return;
    }
    const std::uint32_t group = geometry.group();
    for (std::uint32_t h = 0; h < group; ++h) {
      apart_.push_back(item);
      apart_.back().kv_head = item.kv_head * group + h;
    }
  }

  std::vector<AttendItem> shared_;
  std::vector<AttendItem> apart_;
};

}  // namespace tessera::kernels
