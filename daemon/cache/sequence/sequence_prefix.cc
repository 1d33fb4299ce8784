// How a sequence adopts the segments of a published prefix.

#include <algorithm>
#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/cache/segment/build.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::cache {

// A lane also holds the prefix if it shows more entries of the last of these segments.
bool Sequence::AdoptedLane::HeldBy(const Lane& lane) const {
  if (lane.segments.size() < segments.size()) return false;
  if (segments.empty()) return lane.segments.empty();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const HeldSegment& own = lane.segments[i];
    const bool all = own.entries == segments[i].entries ||
                     (i + 1 == segments.size() && own.entries > segments[i].entries);
    if (own.segment != segments[i].segment || !all) return false;
  }
  return true;
}

bool Sequence::Head::held() const {
  return std::all_of(lanes.begin(), lanes.end(), [](const AdoptedLane& lane) { return lane.held; });
}

bool Sequence::KeepsEveryToken() const {
  MutexLock lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.entries == lane.tail_start; });
}

bool Sequence::HasOriginalRows() const {
  MutexLock lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return lane.entries == lane.tail_start &&
           std::all_of(lane.segments.begin(), lane.segments.end(),
                       [](const HeldSegment& held) { return held.segment->plain(); });
  });
}

// Works like a packing: segments split by the end of the prefix are closed under the lock, their
// rows after it are copied without the lock, and all lanes are published together under it.
absl::StatusOr<Sequence::PrefixAdoption> Sequence::AdoptPrefix(const Sequence& other) {
  Head head;  // outlives the lock: its destructor frees pool memory
  if (absl::Status status = other.ListPrefixSegments(head); !status.ok()) return status;
  {
    MutexLock lock(mutex_);
    if (absl::Status status = TakeSplitSegments(head); !status.ok()) return status;
    if (head.held()) return PrefixAdoption::kAlreadyHeld;
    packing_ = true;
  }
  absl::Status status = CopySplitSegments(head);
  MutexLock lock(mutex_);
  packing_ = false;
  if (status.ok()) status = CheckAdoptable(head);
  if (status.ok()) status = PublishAdopted(head);
  if (!status.ok()) return status;
  return IsAsLongAs(head) ? PrefixAdoption::kAll : PrefixAdoption::kHasMore;
}

bool Sequence::IsAsLongAs(const Head& head) const {
  for (std::uint32_t i = 0; i < model_->lanes(); ++i) {
    if (LaneAt(i).tail_start != head.lanes[i].tokens) return false;
  }
  return true;
}

// `head` holds the segments from here on, so they survive whatever happens to this sequence.
absl::Status Sequence::ListPrefixSegments(Head& head) const {
  MutexLock lock(mutex_);
  if (absl::Status status = Resident(); !status.ok()) return status;
  head.of = id_;
  if (TokensMovedAhead() != 0) return PartlyMovedError();
  head.moved = moved_;
  for (std::uint32_t i = 0; i < model_->lanes(); ++i) {
    const Lane& lane = LaneAt(i);
    head.lanes.push_back(
        {.segments = lane.segments, .entries = lane.entries, .tokens = lane.tail_start});
  }
  return absl::OkStatus();
}

absl::Status Sequence::CheckAdoptable(const Head& head) const {
  if (absl::Status status = Resident(); !status.ok()) return status;
  if (TokensMovedAhead() != 0) return PartlyMovedError();
  const bool as_long = IsAsLongAs(head);
  for (std::uint32_t i = 0; i < model_->lanes(); ++i) {
    const Lane& lane = LaneAt(i);
    const AdoptedLane& theirs = head.lanes[i];
    const bool every_token = lane.entries == lane.tail_start && theirs.entries == theirs.tokens;
    const bool has_it = as_long || (lane.tail_start >= theirs.tokens && every_token);
    if (has_it && moved_.shift == head.moved.shift) continue;
    return absl::FailedPreconditionError(
        Concat(id_.ToString(), " holds ", lane.entries, " entries of ", lane.tail_start,
               " tokens in segments, shifted by ", moved_.shift, "; it cannot share those of ",
               head.of.ToString(), ", which holds ", theirs.entries, " entries of ", theirs.tokens,
               " tokens, shifted by ", head.moved.shift));
  }
  return absl::OkStatus();
}

absl::Status Sequence::TakeSplitSegments(Head& head) {
  if (absl::Status status = CheckAdoptable(head); !status.ok()) return status;
  const auto busy = [this] {
    return WithCause(
        absl::AbortedError(Concat(id_.ToString(), " is being compressed; retry when that is done")),
        ErrorCause::kSequenceBusy);
  };
  if (packing_) return busy();
  for (std::uint32_t i = 0; i < model_->lanes(); ++i) {
    const Lane& lane = LaneAt(i);
    if (lane.recoding) return busy();
    AdoptedLane& theirs = head.lanes[i];
    theirs.losses = lane.losses;
    theirs.held = theirs.HeldBy(lane);
    if (theirs.held) continue;
    for (const HeldSegment& held : lane.segments) {
      if (held.end_position() <= theirs.tokens) continue;
      if (held.segment->first_position() >= theirs.tokens) break;
      // Rows that wait for a strategy with raw copies must be encoded first.
      if (held.segment->raw() != nullptr && !held.segment->raw()->dropped()) return busy();
      theirs.parted = held;
    }
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    if (head.lanes[i].held || lanes_[i].segments.empty()) continue;
    // Closed as if shared with a fork, and held so that it is not reopened: rows that arrive now go
    // to another segment. If the operation fails, the lane may reopen it.
    head.lanes[i].newest = lanes_[i].segments.back().segment;
    lanes_[i].open = false;
  }
  return absl::OkStatus();
}

absl::Status Sequence::CopySplitSegments(Head& head) const {
  for (AdoptedLane& lane : head.lanes) {
    if (lane.parted.segment == nullptr) continue;
    absl::StatusOr<std::shared_ptr<Segment>> rest = CopyEntries(
        memory_, *lane.parted.segment, lane.parted.EntriesBefore(lane.tokens), lane.parted.entries);
    if (!rest.ok()) return rest.status();
    lane.rest = *std::move(rest);
  }
  return absl::OkStatus();
}

// Lanes may have been forked or appended to since.
absl::Status Sequence::PublishAdopted(Head& head) {
  std::vector<pool::Block> snapshots(lanes_.size());
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    AdoptedLane& theirs = head.lanes[i];
    const auto changed = [this] {
      return WithCause(
          absl::AbortedError(Concat(id_.ToString(), " was truncated in the meantime; retry")),
          ErrorCause::kSequenceBusy);
    };
    if (lanes_[i].losses != theirs.losses) return changed();
    if (theirs.held) continue;
    for (HeldSegment held : lanes_[i].segments) {
      if (held.end_position() <= theirs.tokens) continue;
      if (held.segment->first_position() < theirs.tokens) {
        if (held.segment != theirs.parted.segment) return changed();
        held = {.segment = theirs.rest,
                .entries = held.entries - held.EntriesBefore(theirs.tokens)};
      }
      theirs.segments.push_back(std::move(held));
    }
    absl::StatusOr<pool::Block> snapshot =
        memory_.directory->AllocateSnapshot(static_cast<std::uint32_t>(theirs.segments.size()));
    if (!snapshot.ok()) return snapshot.status();
    snapshots[i] = *std::move(snapshot);
  }
  moved_ = head.moved;
  for (Lane& lane : lanes_) lane.moved = head.moved;
  Replaced replaced;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    AdoptedLane& theirs = head.lanes[i];
    if (theirs.held) continue;
    Lane& lane = lanes_[i];
    theirs.parted = {};
    theirs.newest = nullptr;
    std::swap(lane.segments, theirs.segments);
    for (HeldSegment& held : theirs.segments) replaced.segments.push_back(std::move(held.segment));
    lane.entries = lane.tail_start > theirs.tokens ? lane.entries : theirs.entries;
    lane.open = lane.growing = false;
    lane.cut_readers_done = nullptr;
    ++lane.losses;  // token policies that chose among the old entries must notice
    PublishLane(i, std::move(snapshots[i]), replaced);
  }
  FinishPublication(std::move(replaced));
  return absl::OkStatus();
}

}  // namespace tessera::cache
