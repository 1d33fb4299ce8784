// Items by query head, where their rules say so.
//
// The kernels make one choice per kv head, for its whole group. Where every query head shall have a
// choice of its own they are given the layer without groups: each query head is a kv head, whose
// lane lies where its group's does. Both kinds of items may come in one batch of a caller's; they
// become two of the kernels'.
#pragma once

#include <vector>

#include "kernels/dispatch/attend.h"

namespace tessera::kernels {

// The same rows, each query head reading a lane of its own.
constexpr LayerGeometry WithoutGroups(LayerGeometry geometry) {
  geometry.kv_heads = geometry.query_heads;
  return geometry;
}

class ItemsByHead {
 public:
  // Keeps its memory.
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

  // Calls run(batch) for those of `whole`'s kinds of items that there are, until an answer does not
  // satisfy `good`; returns the last answer. There is at least one item. What `whole` has as items
  // is not looked at.
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
