// Begins a step through mapped memory: opens tails, pins the batch, resolves lanes, and waits for
// ring space.

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "client/error/error_info.h"
#include "client/step/mapped_step.h"
#include "daemon/base/strings.h"
#include "proto/shm/pin.h"
#include "proto/shm/resolve.h"

namespace tessera::client {

namespace {

constexpr Clock::Duration kFirstPause = std::chrono::microseconds(50);
constexpr Clock::Duration kLongestPause = std::chrono::milliseconds(5);

}  // namespace

absl::Status MappedStep::Begin(Session& session, std::span<Sequence* const> sequences,
                               const StepOptions& options) {
  absl::Status status = PrepareBatch(session, sequences, options);
  if (status.ok()) status = BeginPinned(session, options);
  if (!status.ok()) {
    Finish();
    Release();
    return status;
  }
  open_ = true;
  pinned_ = true;
  return absl::OkStatus();
}

absl::Status MappedStep::PrepareBatch(Session& session, std::span<Sequence* const> sequences,
                                      const StepOptions& options) {
  session_ = &session;
  absl::Status status = batch_.Take(sequences, options);
  if (!status.ok()) return status;
  // Up to 31 committed tokens may wait in the ring for the rest of their tile.
  const std::uint64_t most = batch_.model().layout().ring_capacity() - (kernels::kTileEntries - 1);
  for (const StepItem& item : batch_.items()) {
    if (item.new_tokens > most) {
      return absl::InvalidArgumentError(
          Concat(item.new_tokens, " new tokens for ", item.sequence->id.ToString(),
                 "; the limit of a step is ", most, ", given a tail ring of ",
                 batch_.model().layout().ring_capacity(), " tokens; append more in bulk"));
    }
  }
  return absl::OkStatus();
}

absl::Status MappedStep::BeginPinned(Session& session, const StepOptions& options) {
  const Clock::TimePoint begun = environment_.clock->Now();
  std::optional<Clock::TimePoint> ring_full_since;
  Clock::Duration pause = kFirstPause;
  std::uint64_t reopened = 0;
  for (;;) {
    if (absl::Status status = OpenTails(session); !status.ok()) return status;
    Look look;
    {
      GateHold hold(mapped_memory_.gate(), slot_);
      if (!hold) return session.status();
      look = PinAndCheck(session.serial());
      if (look.finding == ReadinessState::kReady) {
        if (batch_.is_reading()) return absl::OkStatus();  // AttendRead begins the backend
        CountWait(ring_full_since);
        return BeginBackend(options);
      }
      if (look.finding == ReadinessState::kNewMapping) {
        if (absl::Status status = mapped_memory_.extents().Refresh(); !status.ok()) return status;
      } else if (look.finding == ReadinessState::kRingFull) {
        const Clock::TimePoint now = environment_.clock->Now();
        if (!ring_full_since.has_value()) {
          ring_full_since = now;
          mapped_memory_.control().ring_full_waits.fetch_add(1, std::memory_order_relaxed);
        }
        if (now >= begun + options.timeout) CountWait(ring_full_since);  // WaitForRing gives up
      }
    }
    StepItem& item = batch_.items()[look.item];
    const Clock::Duration waited = environment_.clock->Now() - begun;
    switch (look.finding) {
      case ReadinessState::kNewMapping:
      case ReadinessState::kRevoked:
        break;
      case ReadinessState::kTailGone:
        item.sequence->tail = Tail();
        item.wants_tail = true;
        ++reopened;
        if (waited > options.timeout) {
          return TailsReclaimedError(*item.sequence, reopened, waited);
        }
        break;
      case ReadinessState::kRingFull: {
        absl::Status status = WaitForRing(item, begun + options.timeout, waited, pause);
        if (!status.ok()) return status;
        break;
      }
      default:
        return NotReadyError(session, look);
    }
  }
}

// Most steps do not wait, and then read no clock here.
void MappedStep::CountWait(std::optional<Clock::TimePoint> since) {
  shm::ControlPage& control = mapped_memory_.control();
  std::size_t bucket = 0;
  if (since.has_value()) {
    const Clock::Duration waited = environment_.clock->Now() - *since;
    bucket = static_cast<std::size_t>(
        std::lower_bound(shm::kStepWaitBounds.begin(), shm::kStepWaitBounds.end(), waited) -
        shm::kStepWaitBounds.begin());
    control.step_wait_nanoseconds.fetch_add(static_cast<std::uint64_t>(waited.count()),
                                            std::memory_order_relaxed);
  }
  control.step_waits[bucket].fetch_add(1, std::memory_order_relaxed);
}

absl::Status MappedStep::BeginBackend(const StepOptions& options) {
  absl::Status status = backend_->Begin(batch_, options);
  is_backend_begun_ = true;
  if (status.ok()) return status;
  (void)backend_->Settle(batch_);
  MarkInStep(false);
  (void)shm::Unpin(mapped_memory_.control().readers[slot_].word, pin_);
  return status;
}

void MappedStep::MarkInStep(bool in_step) {
  if (!in_step && !marked_) return;
  commits_.clear();
  for (const StepItem& item : batch_.items()) {
    if (item.sequence->tail.session == 0) continue;  // a read without tail rings
    commits_.push_back({item.sequence->id, &item.sequence->tail, item.sequence->tokens});
  }
  mapped_memory_.tails().Mark(commits_, in_step);
  marked_ = in_step;
}

absl::Status MappedStep::OpenTails(Session& session) {
  without_tail_.clear();
  for (StepItem& item : batch_.items()) {
    if (item.wants_tail && item.sequence->tail.session != session.serial()) {
      without_tail_.push_back(item.sequence->id);
    }
  }
  if (without_tail_.empty()) return absl::OkStatus();
  absl::StatusOr<v1::TailsOpened> opened = session.OpenTails(without_tail_);
  if (!opened.ok()) return opened.status();
  GateHold hold(mapped_memory_.gate(), slot_);
  if (!hold) return session.status();
  int next = 0;
  absl::Status changed = absl::OkStatus();
  for (StepItem& item : batch_.items()) {
    SequenceState& sequence = *item.sequence;
    if (!item.wants_tail || sequence.tail.session == session.serial()) continue;
    const v1::TailPlace& place = opened->tails(next++);
    absl::StatusOr<Tail> tail =
        mapped_memory_.tails().Open({.sequence = sequence.id,
                                     .extent = place.extent(),
                                     .extent_bytes = place.extent_bytes(),
                                     .offset = place.offset(),
                                     .region_bytes = sequence.model->layout().tail_bytes(),
                                     .commit_slot = place.commit_slot(),
                                     .generation = place.generation(),
                                     .tokens = place.tokens()},
                                    session.serial());
    if (!tail.ok()) return tail.status();
    sequence.tail = *std::move(tail);
    sequence.resolved.version = 0;
    if (place.tokens() != sequence.tokens && !sequence.uncertain) {
      // The worker has computed the new rows for other positions, so it must learn of the change.
      changed = absl::FailedPreconditionError(Concat(
          sequence.id.ToString(), " holds ", place.tokens(), " tokens, but this worker left ",
          sequence.tokens, ": another caller has changed it; read tokens() again"));
    } else if (place.position_shift() != sequence.position_shift) {
      changed = absl::FailedPreconditionError(
          Concat(sequence.id.ToString(), " has its positions shifted by ", place.position_shift(),
                 ", but this worker left them shifted by ", sequence.position_shift,
                 ": another caller has compressed it; read next_position() again"));
    }
    sequence.SetTokens(place.tokens());
    sequence.position_shift = place.position_shift();
    sequence.uncertain = false;
  }
  return changed;
}

MappedStep::Look MappedStep::PinAndCheck(std::uint64_t session) {
  shm::Word& slot = mapped_memory_.control().readers[slot_].word;
  pin_ = shm::Pin(slot, mapped_memory_.extents().header().epoch);
  MarkInStep(true);
  Look look;
  if (!mapped_memory_.extents().Current()) look.finding = ReadinessState::kNewMapping;
  for (std::size_t i = 0; i < batch_.items().size() && look.finding == ReadinessState::kReady;
       ++i) {
    look = {LookAt(batch_.items()[i], session), i};
  }
  // The resolved lanes may lie in an extent that was added after the first check.
  if (look.finding == ReadinessState::kReady && !mapped_memory_.extents().Current()) {
    look.finding = ReadinessState::kNewMapping;
  }
  if (look.finding == ReadinessState::kReady) return look;
  MarkInStep(false);
  if (!shm::Unpin(slot, pin_)) {
    for (StepItem& item : batch_.items()) item.sequence->resolved.version = 0;
    look.finding = ReadinessState::kRevoked;
  }
  return look;
}

MappedStep::ReadinessState MappedStep::LookAt(StepItem& item, std::uint64_t session) {
  SequenceState& sequence = *item.sequence;
  const shm::SequenceBlock* block = nullptr;
  const shm::Word* words =
      shm::LaneWords(mapped_memory_.extents().directory(), sequence.directory_offset, &block);
  if (block == nullptr) return ReadinessState::kBroken;
  // Check this first: a freed block may hold anything, including a wrong lane count.
  if (block->sequence_id.load() != sequence.id.value()) return ReadinessState::kGone;
  if (words == nullptr) return ReadinessState::kBroken;
  const std::uint32_t state = block->state.load();
  // Opening a tail restores the sequence.
  if (state == shm::kSequenceOffloaded) return ReadinessState::kTailGone;
  if (state != shm::kSequenceLive) return ReadinessState::kFailed;
  if (block->tail_generation.load() != sequence.tail.generation) return ReadinessState::kTailGone;
  // Read the version before the lane words: the next step resolves later changes.
  const std::uint64_t version = block->version.load();
  ResolvedLanes& resolved = sequence.resolved;
  if (resolved.version != version || resolved.session != session) {
    resolved.version = 0;
    const bool resolves =
        block->lanes == sequence.model->layout().lanes() && Resolve(sequence, words);
    // The words may have been read after the tail was closed.
    if (block->tail_generation.load() != sequence.tail.generation) return ReadinessState::kTailGone;
    if (!resolves) return ReadinessState::kBroken;
    if (!item.wants_tail && !HoldsAllTokens(sequence)) return ReadinessState::kTailGone;
    resolved.version = version;
    resolved.session = session;
  }
  item.block = block;
  item.base = sequence.tokens;
  if (batch_.is_reading()) return ReadinessState::kReady;
  item.first_query_position = item.base;
  const std::uint64_t limit = block->ring_start.load() + sequence.model->layout().ring_capacity();
  return item.base + item.new_tokens <= limit ? ReadinessState::kReady : ReadinessState::kRingFull;
}

bool MappedStep::Resolve(SequenceState& sequence, const shm::Word* lane_words) {
  const shm::MappedArena directory = mapped_memory_.extents().directory();
  const shm::MappedArena pool = mapped_memory_.extents().pool();
  const shm::LaneLayout& layout = sequence.model->layout();
  ResolvedLanes& resolved = sequence.resolved;
  resolved.segments.clear();
  resolved.lanes.resize(layout.lanes());
  first_segments_.resize(layout.lanes());
  for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
    for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
      const std::uint32_t lane = layout.lane(layer, head);
      first_segments_[lane] = resolved.segments.size();
      shm::ResolvedLane found;
      if (shm::ResolveLane(lane_words[lane].load(), directory, pool, resolved.segments, found) ==
          shm::ResolveStatus::kOutOfBounds) {
        return false;
      }
      if (found.tail_start > sequence.tokens ||
          sequence.tokens - found.tail_start > layout.ring_capacity()) {
        return false;
      }
      const shm::TailRing ring = layout.ring(sequence.tail.region, layer, head);
      const bool has_tail = sequence.tail.region != nullptr;
      resolved.lanes[lane] = {.segments = nullptr,
                              .segment_count = found.segments,
                              .tail = {.ring = has_tail ? ring.base : nullptr,
                                       .ring_tiles = has_tail ? ring.tiles : 0,
                                       .begin = found.tail_start,
                                       .end = found.tail_start}};
    }
  }
  // Only now: the vector no longer reallocates.
  for (std::uint32_t lane = 0; lane < layout.lanes(); ++lane) {
    resolved.lanes[lane].segments = resolved.segments.data() + first_segments_[lane];
  }
  return true;
}

absl::Status MappedStep::NotReadyError(Session& session, const Look& look) const {
  const SequenceState& sequence = *batch_.items()[look.item].sequence;
  // Ask the daemon: the session may have ended without this client having seen the end of its
  // stream yet.
  v1::DescribeRequest request;
  v1::DescribeResponse description;
  request.set_sequence_id(sequence.id.value());
  absl::Status status = session.Call(request, description);
  if (!status.ok() && !absl::IsNotFound(status)) return status;
  if (look.finding == ReadinessState::kGone) {
    return absl::NotFoundError(
        Concat(sequence.id.ToString(), " is gone: it was freed, evicted or handed over"));
  }
  if (look.finding == ReadinessState::kFailed) {
    return WithCause(absl::FailedPreconditionError(
                         Concat(sequence.id.ToString(), " has failed: ", description.failure())),
                     ErrorCause::kSequenceFailed);
  }
  return absl::InternalError(Concat("the mapped snapshots of ", sequence.id.ToString(),
                                    " do not match its ", sequence.tokens,
                                    " tokens, or point out of bounds"));
}

absl::Status MappedStep::TailsReclaimedError(const SequenceState& sequence, std::uint64_t times,
                                             Clock::Duration waited) const {
  const std::uint64_t bytes = batch_.model().layout().tail_bytes();
  const absl::Status status = absl::ResourceExhaustedError(
      Concat("tails of the batch were closed ", times, " times in ",
             std::chrono::duration<double>(waited).count(), " s, most recently that of ",
             sequence.id.ToString(), ": the pool has no room for the tails of all ",
             batch_.items().size(), " sequences at the same time, ", bytes,
             " bytes each, or another worker appends to one of them. Retry with fewer sequences "
             "in a step, or free some"));
  return WithCause(status, ErrorCause::kPoolFull);
}

absl::Status MappedStep::WaitForRing(const StepItem& item, Clock::TimePoint deadline,
                                     Clock::Duration waited, Clock::Duration& pause) {
  const std::uint64_t capacity = batch_.model().layout().ring_capacity();
  if (environment_.clock->Now() >= deadline) {
    const absl::Status status = absl::ResourceExhaustedError(
        Concat("the tail ring of ", item.sequence->id.ToString(), " is full: it has room for ",
               capacity, " tokens, and the daemon has not absorbed enough of the ",
               item.sequence->tokens, " committed tokens to accept ", item.new_tokens,
               " more; waited ", std::chrono::duration<double>(waited).count(),
               " s; retry, or free sequences if the pool is full"));
    return WithCause(status, ErrorCause::kTailRingFull);
  }
  // Regardless of the wake word: a daemon that found no room for these tiles sleeps until
  // signalled.
  mapped_memory_.source().SignalWake();
  environment_.sleeper->Sleep(pause);
  pause = std::min(2 * pause, kLongestPause);
  return absl::OkStatus();
}

}  // namespace tessera::client
