// What a sequence has to do with published prefixes.

#include <algorithm>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/cache/sequence.h"

namespace tessera::cache {

bool Sequence::KeepsEveryToken() const {
  MutexLock lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.entries == lane.tail_start; });
}

bool Sequence::AsItCame() const {
  MutexLock lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return lane.entries == lane.tail_start &&
           std::all_of(lane.segments.begin(), lane.segments.end(),
                       [](const HeldSegment& held) { return held.segment->plain(); });
  });
}

absl::Status Sequence::TakeSegmentsOf(const Sequence& other) {
  // Held here, so that they stay whatever becomes of the other. Its own lock first and alone.
  std::vector<Lane> theirs;
  PositionMove moved;
  {
    MutexLock lock(other.mutex_);
    if (absl::Status status = other.Usable(); !status.ok()) return status;
    moved = other.moved_;
    for (const Lane& lane : other.lanes_) {
      theirs.emplace_back();
      theirs.back().segments = lane.segments;
      theirs.back().entries = lane.entries;
      theirs.back().tail_start = lane.tail_start;
    }
  }
  MutexLock lock(mutex_);
  if (absl::Status status = Usable(); !status.ok()) return status;
  bool same = true;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].recoding || packing_) {
      return absl::AbortedError(Concat(id_.ToString(), " is being compressed; ask again"));
    }
    if (lanes_[i].tail_start != theirs[i].tail_start || moved_.shift != moved.shift) {
      return absl::FailedPreconditionError(
          Concat(id_.ToString(), " holds ", lanes_[i].tail_start, " tokens in segments, moved by ",
                 moved_.shift, "; ", other.id_.ToString(), " ", theirs[i].tail_start, ", moved by ",
                 moved.shift));
    }
    same = same && std::ranges::equal(lanes_[i].segments, theirs[i].segments,
                                      [](const HeldSegment& a, const HeldSegment& b) {
                                        return a.segment == b.segment && a.entries == b.entries;
                                      });
  }
  if (same) return absl::OkStatus();
  std::vector<pool::Block> snapshots;
  for (const Lane& lane : theirs) {
    absl::StatusOr<pool::Block> snapshot =
        memory_.directory->AllocateSnapshot(static_cast<std::uint32_t>(lane.segments.size()));
    if (!snapshot.ok()) return snapshot.status();
    snapshots.push_back(*std::move(snapshot));
  }
  moved_ = moved;
  Replaced replaced;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    for (HeldSegment& held : lane.segments) replaced.segments.push_back(std::move(held.segment));
    lane.segments = std::move(theirs[i].segments);
    lane.entries = theirs[i].entries;
    lane.open = lane.growing = false;
    lane.cut_drained = nullptr;
    ++lane.losses;  // whoever chose among entries chose among others
    PublishLane(i, std::move(snapshots[i]), replaced);
  }
  FinishPublication(std::move(replaced));
  return absl::OkStatus();
}

}  // namespace tessera::cache
