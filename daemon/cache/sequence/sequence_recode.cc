// How the newest part of a lane is recoded: taken under the lock, encoded without it, swapped in
// under it. Only one lane at a time per caller, so only that lane needs memory for both forms.

#include <algorithm>
#include <span>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/cache/sequence/join.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::cache {

namespace {

std::uint64_t TileBytes(const std::vector<HeldSegment>& segments) {
  std::uint64_t bytes = 0;
  for (const HeldSegment& held : segments) bytes += held.segment->tile_bytes();
  return bytes;
}

}  // namespace

absl::Status Sequence::Recode(const RecodeOptions& options, const Recoder& work) {
  TESSERA_CHECK(options.lane < model_->lanes(), "the lane index is in range");
  OpenRun run;  // declared before the lock: dropping these frees pool memory
  absl::StatusOr<std::optional<LaneSwap>> swap;
  {
    MutexLock lock(mutex_);
    if (absl::Status status = Resident(); !status.ok() || lanes_.empty()) return status;
    Lane& lane = lanes_[options.lane];
    if (packing_ || lane.recoding) {
      return WithCause(
          absl::AbortedError(Concat(id_.ToString(),
                                    " is being compressed by another call; retry when it is done")),
          ErrorCause::kSequenceBusy);
    }
    run = OpenRunOf(options.lane, options.whole);
    if (run.plain_entries() < options.min_dense_entries ||
        run.settled_entries() + run.plain_entries() + run.provisional_entries() == 0) {
      return absl::OkStatus();
    }
    lane.recoding = true;
    // Closed as if shared with a fork. If the work fails, the lane may reopen it.
    if (!run.plain.empty()) lane.open = false;
  }
  swap = work(run);
  // Readers may still use the replaced segments but never their raw copies. These are freed at
  // once, without the lock, unless another holder (such as a fork) waits with the same segment.
  std::vector<std::shared_ptr<Segment>> entries_without_raw;
  const absl::Cleanup drop = [&entries_without_raw] {
    for (const std::shared_ptr<Segment>& segment : entries_without_raw) segment->raw()->Drop();
  };
  Replaced replaced;
  MutexLock lock(mutex_);
  if (freed_) return Usable();
  lanes_[options.lane].recoding = false;
  if (!swap.ok()) return swap.status();
  if (!swap->has_value()) return absl::OkStatus();
  if (absl::Status status = Usable(); !status.ok()) return status;
  if (absl::Status status = SwapIn(run, **swap, options.counted, replaced); !status.ok()) {
    return status;
  }
  // Releases the references, so that the lane is the only holder of what it opens next.
  run = OpenRun();
  for (const std::shared_ptr<Segment>& segment : replaced.segments) {
    if (segment.use_count() == 1 && segment->raw_unshared()) entries_without_raw.push_back(segment);
  }
  FinishPublication(std::move(replaced));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<OpenRun>> Sequence::LookAt(std::uint32_t layer, bool whole) const {
  MutexLock lock(mutex_);
  if (absl::Status status = Resident(); !status.ok()) return status;
  std::vector<OpenRun> runs;
  for (std::uint32_t head = 0; head < model_->layout().kv_heads(layer); ++head) {
    OpenRun run = OpenRunOf(model_->layout().lane(layer, head), whole);
    for (const std::vector<HeldSegment>* segments : {&run.settled, &run.provisional, &run.plain}) {
      for (const HeldSegment& held : *segments) {
        for (std::uint32_t entry = 0; entry < held.entries; entry += kernels::kTileEntries) {
          run.tiles.push_back(held.segment->TileData(entry / kernels::kTileEntries));
        }
      }
    }
    runs.push_back(std::move(run));
  }
  return runs;
}

std::uint64_t Sequence::position_shift() const {
  MutexLock lock(mutex_);
  return moved_.shift;
}

bool Sequence::HasMoved() const {
  MutexLock lock(mutex_);
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const Lane& lane) { return lane.moved.shift != 0; });
}

absl::Status Sequence::CheckPositionsAgree() const {
  MutexLock lock(mutex_);
  return TokensMovedAhead() == 0 ? absl::OkStatus() : PartlyMovedError();
}

absl::StatusOr<std::uint64_t> Sequence::PositionShiftOf(std::uint32_t layer) const {
  MutexLock lock(mutex_);
  if (absl::Status status = Usable(); !status.ok()) return status;
  if (IsOnlyMovedLayer(layer)) return PartlyMovedError();
  return moved_.shift;
}

absl::StatusOr<Sequence::TailBlock> Sequence::BeginMoves(std::uint32_t first_layer,
                                                         std::uint32_t layers) {
  MutexLock lock(mutex_);
  if (absl::Status status = Usable(); !status.ok()) return status;
  if (packing_) {
    return WithCause(
        absl::AbortedError(
            Concat(id_.ToString(), " is being compressed by another call; retry when it is done")),
        ErrorCause::kSequenceBusy);
  }
  for (const Lane& lane : lanes_) {
    for (const HeldSegment& held : lane.segments) {
      if (!held.segment->shape().packed()) continue;
      return absl::FailedPreconditionError(Concat(
          id_.ToString(), " holds packed entries from position ", held.segment->first_position(),
          " on, which cannot move to other positions; set a policy that moves no positions"));
    }
  }
  if (absl::Status status = CloseTailLocked(); !status.ok()) return status;
  for (std::uint32_t layer = first_layer; layer < first_layer + layers; ++layer) {
    const std::uint32_t lane = model_->layout().lane(layer, 0);
    absl::Status status = MayMove(lane, LaneAt(lane).tail_start);
    if (!status.ok()) return status;
  }
  ++tail_blocks_;
  return TailBlock(nullptr, [self = shared_from_this()](std::nullptr_t) {
    MutexLock held(self->mutex_);
    --self->tail_blocks_;
  });
}

// Keeps lanes aligned: a token may stand at different positions in different lanes only until all
// of them have been compressed.
absl::Status Sequence::MayMove(std::uint32_t index, std::uint64_t until) const {
  const std::uint64_t held = LaneAt(index).tail_start;
  if (held != until) {
    return WithCause(
        absl::AbortedError(Concat("lane ", index, " of ", id_.ToString(), " holds ", held,
                                  " tokens, but the move was prepared for ", until, "; retry")),
        ErrorCause::kSequenceBusy);
  }
  for (const Lane& lane : lanes_) {
    if (lane.tail_start <= held) continue;
    return absl::FailedPreconditionError(
        Concat(id_.ToString(), " holds ", held, " tokens in some layers and ", lane.tail_start,
               " in others; the policy moves positions and needs equal counts: append the "
               "missing rows first"));
  }
  return absl::OkStatus();
}

bool Sequence::IsOnlyMovedLayer(std::uint32_t layer) const {
  for (std::uint32_t head = 0; head < model_->layout().kv_heads(layer); ++head) {
    if (LaneAt(model_->layout().lane(layer, head)).moved.shift != moved_.shift) return true;
  }
  return false;
}

// A token has one position in all lanes. The previous one is valid until all lanes have moved.
void Sequence::AdoptMoves() {
  PositionMove all = lanes_.front().moved;
  for (const Lane& lane : lanes_) {
    if (lane.moved.shift != all.shift) return;
    all.until = std::max(all.until, lane.moved.until);
  }
  moved_ = all;
}

std::uint64_t Sequence::TokensMovedAhead() const {
  std::uint64_t until = 0;
  for (const Lane& lane : lanes_) {
    if (lane.moved.shift != moved_.shift) until = std::max(until, lane.moved.until);
  }
  return until;
}

absl::Status Sequence::PartlyMovedError() const {
  return absl::FailedPreconditionError(
      Concat("some lanes of ", id_.ToString(), " have moved their first ", TokensMovedAhead(),
             " tokens to other positions and others have not; compress all of its layers "
             "first"));
}

std::uint64_t Sequence::OpenEntries(std::uint32_t lane) const {
  MutexLock lock(mutex_);
  if (freed_) return 0;
  const OpenRun run = OpenRunOf(lane);
  return run.plain_entries() + run.provisional_entries();
}

std::vector<std::uint32_t> Sequence::LanesNearSegmentLimit(std::size_t segments) const {
  MutexLock lock(mutex_);
  std::vector<std::uint32_t> crowded;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].segments.size() > segments) crowded.push_back(i);
  }
  return crowded;
}

void Sequence::DropRawRows() {
  std::vector<std::shared_ptr<Segment>> segments;  // freed without the lock
  {
    MutexLock lock(mutex_);
    for (const Lane& lane : lanes_) {
      for (const HeldSegment& held : lane.segments) {
        const bool shared = held.segment.use_count() > 1;  // another holder may need them
        if (held.segment->raw() != nullptr && !shared) segments.push_back(held.segment);
      }
    }
  }
  for (const std::shared_ptr<Segment>& segment : segments) segment->raw()->Drop();
}

OpenRun Sequence::OpenRunOf(std::uint32_t index, bool whole) const {
  const Lane& lane = LaneAt(index);
  const std::vector<HeldSegment>& segments = lane.segments;
  std::size_t first_plain = segments.size();
  // Dense rows that a token policy has already selected from count as settled.
  std::uint64_t end = lane.tail_start;
  while (first_plain > 0 && segments[first_plain - 1].segment->appendable() &&
         segments[first_plain - 1].end_position() == end) {
    end = segments[--first_plain].segment->first_position();
  }
  std::size_t first = first_plain;
  while (first > 0 && segments[first - 1].segment->raw() != nullptr &&
         segments[first - 1].segment->waits_for_strategy()) {
    --first;
  }
  const shm::LaneLayout& layout = model_->layout();
  std::uint32_t layer = 0;
  while (layer + 1 < layout.layers() && layout.lane(layer + 1, 0) <= index) ++layer;
  OpenRun run = {.lane = index, .layer = layer, .kv_head = index - layout.lane(layer, 0)};
  run.losses = lane.losses;
  run.tokens = lane.tail_start;
  if (whole) run.settled.assign(segments.begin(), segments.begin() + first);
  for (std::size_t i = 0; i < first && !whole; ++i) run.before += segments[i].entries;
  run.segments_before = whole ? 0 : first;
  run.provisional.assign(segments.begin() + first, segments.begin() + first_plain);
  run.plain.assign(segments.begin() + first_plain, segments.end());
  run.first_position =
      first < segments.size() ? segments[first].segment->first_position() : lane.tail_start;
  for (std::size_t i = first_plain; i-- > 0;) {
    if (segments[i].segment->plain()) continue;
    run.previous = segments[i].segment;
    run.grows = lane.growing && i + 1 == first_plain;
    run.grows_at = segments[i].entries;
    break;
  }
  for (std::size_t i = first_plain; i-- > 0 && run.packed == nullptr;) {
    if (segments[i].segment->shape().packed()) run.packed = segments[i].segment;
  }
  return run;
}

// The lane may have been cut, forked or appended to since. Replaces the taken segments that it
// still shows, keeping its current entry count.
absl::Status Sequence::SwapIn(const OpenRun& run, LaneSwap& swap, ReplacedBytes* counted,
                              Replaced& replaced) {
  Lane& lane = lanes_[run.lane];
  std::vector<HeldSegment> sources;
  if (swap.whole) sources = run.settled;
  if (swap.whole || swap.all) {
    sources.insert(sources.end(), run.provisional.begin(), run.provisional.end());
  }
  sources.insert(sources.end(), run.plain.begin(), run.plain.end());
  const auto first = std::find_if(
      lane.segments.begin(), lane.segments.end(),
      [&](const HeldSegment& held) { return held.segment == sources.front().segment; });
  std::uint64_t taken = 0;
  for (const HeldSegment& source : sources) taken += source.entries;
  std::uint64_t shown = 0;
  std::size_t count = 0;
  while (count < sources.size() && first + count != lane.segments.end() &&
         (first + count)->segment == sources[count].segment) {
    shown += (first + count)->entries;
    ++count;
  }
  const bool gathered = !swap.held.empty();
  if ((swap.drops || gathered) && shown != taken) {
    return WithCause(
        absl::AbortedError(Concat("lane ", run.lane, " of ", id_.ToString(),
                                  " was truncated while it was being compressed; retry")),
        ErrorCause::kSequenceBusy);
  }
  if (swap.moves.has_value()) {
    TESSERA_CHECK(!decoding(), "entries are moved under a TailBlock");
    if (absl::Status may = MayMove(run.lane, swap.moves->until); !may.ok()) return may;
  }
  if (count == 0) return absl::OkStatus();  // everything taken has been cut off
  if (swap.growth.has_value() &&
      !(lane.growing && first != lane.segments.begin() &&
        (first - 1)->segment == swap.growth->segment && (first - 1)->entries == run.grows_at)) {
    return WithCause(
        absl::AbortedError(Concat("lane ", run.lane, " of ", id_.ToString(),
                                  " was forked or truncated while it was being encoded; retry")),
        ErrorCause::kSequenceBusy);
  }

  std::uint64_t left = shown;
  if (swap.drops) {
    left = 0;
    for (const std::shared_ptr<Segment>& segment : swap.segments) left += segment->filled();
    for (const HeldSegment& held : swap.held) left += held.entries;
    TESSERA_CHECK(left <= shown && !swap.growth.has_value(), "dropping leaves fewer entries");
  }
  const std::uint64_t remaining = left;
  const std::uint64_t grown =
      swap.growth.has_value() ? std::min<std::uint64_t>(left, swap.growth->entries()) : 0;
  left -= grown;
  std::vector<HeldSegment> targets = std::move(swap.held);
  for (const HeldSegment& held : targets) left -= held.entries;
  for (const std::shared_ptr<Segment>& segment : swap.segments) {
    const std::uint64_t entries = std::min<std::uint64_t>(left, segment->filled());
    if (entries == 0) break;
    targets.push_back({segment, static_cast<std::uint32_t>(entries)});
    left -= entries;
  }
  TESSERA_CHECK(left == 0, "the new segments cover exactly the replaced entries");
  absl::StatusOr<pool::Block> snapshot = memory_.directory->AllocateSnapshot(
      static_cast<std::uint32_t>(lane.segments.size() - count + targets.size()));
  if (!snapshot.ok()) return snapshot.status();

  if (!gathered) CountSwap(sources, swap);
  if (counted != nullptr) {
    const std::uint64_t added = swap.growth.has_value() ? swap.growth->tiles.pool_bytes() : 0;
    counted->before.fetch_add(TileBytes(sources), std::memory_order_relaxed);
    counted->after.fetch_add(TileBytes(targets) + added, std::memory_order_relaxed);
  }
  if (swap.growth.has_value()) {
    SegmentGrowth& growth = *swap.growth;
    const std::uint32_t filled = run.grows_at + growth.entries();
    pool::Block old = growth.segment->AddTiles(std::move(growth.tiles), std::move(growth.table));
    growth.segment->set_filled(filled);
    if (old.valid()) replaced.blocks.push_back(std::move(old));
    (first - 1)->entries += static_cast<std::uint32_t>(grown);
  }
  absl::flat_hash_set<const Segment*> stay;
  for (const HeldSegment& held : targets) stay.insert(held.segment.get());
  for (std::size_t i = 0; i < count; ++i) {
    if (stay.contains((first + i)->segment.get())) continue;
    replaced.segments.push_back(std::move((first + i)->segment));
  }
  const auto at = lane.segments.erase(first, first + count);
  lane.segments.insert(at, targets.begin(), targets.end());
  if (swap.drops) {
    ++lane.losses;
    lane.entries -= shown - remaining;
    memory_.counters->entries_dropped.fetch_add(shown - remaining, std::memory_order_relaxed);
  }
  if (swap.moves.has_value()) {
    lane.moved = *swap.moves;
    AdoptMoves();
  }
  if (swap.by_hand) set_has_manual_changes();
  // A cut leaves a partial tile, and a fork in the meantime shares the old segments.
  lane.growing = swap.growing && shown == taken && (lane.growing || !gathered);
  PublishLane(run.lane, *std::move(snapshot), replaced);
  return absl::OkStatus();
}

void Sequence::CountSwap(const std::vector<HeldSegment>& sources, const LaneSwap& swap) {
  TenantCounters& counters = *memory_.counters;
  const std::uint64_t before = TileBytes(sources);
  std::uint64_t after = 0;
  std::uint64_t tiles = 0;
  bool packs = swap.growth.has_value() || swap.taken_over > 0;
  if (swap.growth.has_value()) {
    after += swap.growth->tiles.pool_bytes();
    tiles += swap.growth->tiles.size();
    counters.entries_packed.fetch_add(swap.growth->entries(), std::memory_order_relaxed);
  }
  for (const std::shared_ptr<Segment>& segment :
       std::span(swap.segments).subspan(swap.taken_over)) {
    after += segment->tile_bytes();
    tiles += segment->tiles();
    if (!segment->shape().packed() && segment->shape().block == 0) continue;
    packs = true;
    counters.entries_packed.fetch_add(segment->filled(), std::memory_order_relaxed);
  }
  counters.tiles_written.fetch_add(tiles, std::memory_order_relaxed);
  if (!packs) return;
  counters.pack_bytes_before.fetch_add(before, std::memory_order_relaxed);
  counters.pack_bytes_after.fetch_add(after, std::memory_order_relaxed);
}

}  // namespace tessera::cache
