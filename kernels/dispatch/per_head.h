// Splits items whose selection rule sets `each_head` by query head.
//
// Kernels make one choice of blocks per kv head. To get one per query head, the caller passes a
// layer without groups: every query head becomes a kv head whose lane is that of its group. One
// batch may contain both kinds of items; it is run as two kernel batches.
#pragma once

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
  void Add(const LayerGeometry& geometry, const AttendItem& item) {
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
  std::vector<AttendItem> shared_;
  std::vector<AttendItem> apart_;
};

}  // namespace tessera::kernels
