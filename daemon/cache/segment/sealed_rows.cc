#include "daemon/cache/segment/sealed_rows.h"

#include <algorithm>
#include <utility>

namespace tessera::cache {

SealedRows::SealedRows(std::string policy, std::span<const HeldSegment> sources,
                       std::span<const std::shared_ptr<Segment>> segments)
    : policy_(std::move(policy)), segments_(segments.begin(), segments.end()) {
  for (const HeldSegment& held : sources) {
    sources_.push_back({held.segment, held.segment->rewrites(), held.entries});
  }
}

std::uint64_t SealedRows::EntriesHeld() const {
  std::uint64_t entries = 0;
  for (const std::weak_ptr<Segment>& weak : segments_) {
    const std::shared_ptr<Segment> segment = weak.lock();
    if (segment == nullptr) break;
    entries += segment->filled();
  }
  return entries;
}

std::uint64_t SealedRows::CommonWith(std::span<const HeldSegment> held) const {
  std::uint64_t common = 0;
  for (std::size_t i = 0; i < std::min(held.size(), sources_.size()); ++i) {
    const Source& source = sources_[i];
    // Compares owners: detects a new segment at a freed address without taking a reference.
    const bool same = !source.segment.owner_before(held[i].segment) &&
                      !held[i].segment.owner_before(source.segment);
    if (!same) break;
    const std::uint32_t as_it_was =
        held[i].segment->rewrites() == source.rewrites
            ? source.entries
            : std::min(source.entries, held[i].segment->FirstRewritten(source.rewrites));
    common += std::min(held[i].entries, as_it_was);
    if (held[i].entries != source.entries || as_it_was != source.entries) break;  // others follow
  }
  return common;
}

std::vector<std::shared_ptr<Segment>> SealedRows::For(std::span<const HeldSegment> held,
                                                      std::uint64_t most) const {
  std::uint64_t left = std::min(most, CommonWith(held));
  std::vector<std::shared_ptr<Segment>> segments;
  for (const std::weak_ptr<Segment>& weak : segments_) {
    std::shared_ptr<Segment> segment = weak.lock();
    if (segment == nullptr || segment->filled() > left) break;
    left -= segment->filled();
    segments.push_back(std::move(segment));
  }
  return segments;
}

}  // namespace tessera::cache
