#include "daemon/compaction/observation/lane_entries.h"

namespace tessera::compaction {

LaneEntryList::LaneEntryList(const cache::OpenRun& run) : before_(run.before), tokens_(run.tokens) {
  positions_.reserve(run.settled_entries() + run.provisional_entries() + run.plain_entries());
  for (const std::vector<cache::HeldSegment>* segments :
       {&run.settled, &run.provisional, &run.plain}) {
    for (const cache::HeldSegment& held : *segments) Add(held);
  }
  if (!weights_.empty()) weights_.resize(positions_.size(), 1.0f);
}

void LaneEntryList::Add(const cache::HeldSegment& held) {
  const cache::Segment& segment = *held.segment;
  const cache::EntryList* const list = segment.entry_list();
  if (list != nullptr && !list->weights.empty()) {
    weights_.resize(positions_.size(), 1.0f);
    weights_.insert(weights_.end(), list->weights.begin(), list->weights.begin() + held.entries);
  }
  for (std::uint32_t entry = 0; entry < held.entries; ++entry) {
    positions_.push_back(segment.PositionOf(entry));
  }
}

}  // namespace tessera::compaction
