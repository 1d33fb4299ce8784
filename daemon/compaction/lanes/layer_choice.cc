#include "daemon/compaction/lanes/layer_choice.h"

#include <algorithm>
#include <utility>

namespace tessera::compaction {

void LayerChoice::CutTo(std::uint64_t tokens) {
  cut_at = std::min(cut_at, tokens);
  end = std::min(end, tokens);
  until = std::min(until, tokens);
  memory.CutTo(tokens, until);
}

bool LayerChoice::Untouched(std::uint32_t kv_head) const {
  const policies::LaneDecision& lane = lanes[kv_head];
  return !lane.merges() && lane.kept.size() == decided[kv_head];
}

bool LayerChoice::UntouchedAll() const {
  for (std::uint32_t head = 0; head < lanes.size(); ++head) {
    if (!Untouched(head)) return false;
  }
  return true;
}

std::vector<policies::ChunkEnds> LayerChoice::BoundariesNow(
    const policies::LayerMemory& before) const {
  std::vector<policies::ChunkEnds> now = memory.boundaries;
  for (std::size_t head = 0; head < now.size(); ++head) {
    if (done[head]) continue;
    now[head] = head < before.boundaries.size() ? before.boundaries[head] : policies::ChunkEnds();
  }
  return now;
}

void LayerChoice::KeepFirst(std::uint32_t kv_head, std::uint64_t count) {
  policies::LaneDecision& lane = lanes[kv_head];
  policies::LaneDecision first;
  for (std::size_t i = 0; i < lane.kept.size() && lane.kept[i] < count; ++i) {
    first.kept.push_back(lane.kept[i]);
    if (!lane.merges()) continue;
    if (first.begins.empty()) first.begins.push_back(0);
    for (std::uint32_t m = lane.begins[i]; m < lane.begins[i + 1]; ++m) {
      if (lane.members[m] < count) first.members.push_back(lane.members[m]);
    }
    first.begins.push_back(static_cast<std::uint32_t>(first.members.size()));
  }
  lane = std::move(first);
}

}  // namespace tessera::compaction
