// Reads through mapped memory: attention over a pinned snapshot and the tail rings beside it.

#include <algorithm>
#include <utility>

#include "client/error/error_info.h"
#include "client/step/mapped_step.h"
#include "proto/shm/pin.h"

namespace tessera::client {

absl::Status MappedStep::BeginRead(Session& session, std::span<Sequence* const> sequences,
                                   const ReadOptions& options) {
  session_ = &session;
  read_options_ = {.new_tokens_each = {},
                   .timeout = options.timeout,
                   .executor = options.executor,
                   .cuda_stream = options.cuda_stream};
  absl::Status status = batch_.TakeForReading(sequences);
  if (status.ok()) {
    for (StepItem& item : batch_.items()) {
      SequenceState& sequence = *item.sequence;
      if (sequence.tail.session != session.serial()) sequence.tail = Tail();
      // Opening the tail asks the daemon for the number of tokens.
      item.wants_tail = sequence.tail.session != 0 || sequence.uncertain;
    }
    status = BeginPinned(session, read_options_);
  }
  if (!status.ok()) {
    Finish();
    Release();
    return status;
  }
  open_ = true;
  pinned_ = true;
  return absl::OkStatus();
}

bool MappedStep::HoldsAllTokens(const SequenceState& sequence) const {
  return std::ranges::all_of(sequence.resolved.lanes, [&](const kernels::LaneView& lane) {
    return lane.tail.begin == sequence.tokens;
  });
}

// A backend takes the shape of the batch when it begins, so a new shape begins again.
absl::Status MappedStep::PrepareQueries(bool changed) {
  if (is_backend_begun_ && !changed) return absl::OkStatus();
  if (is_backend_begun_) {
    absl::Status status = backend_->Settle(batch_);
    if (absl::IsDataLoss(status)) return OutOfBounds(status);
    if (!status.ok()) return status;
  }
  is_backend_begun_ = true;
  return backend_->Begin(batch_, read_options_);
}

absl::Status MappedStep::AttendRead(std::uint32_t layer, const ReadTensors& tensors) {
  const absl::StatusOr<bool> changed = batch_.SetQueries(tensors);
  if (!changed.ok()) return changed.status();
  const StepTensors shared = AsStepTensors(tensors);
  absl::Status status = batch_.CheckAttend(layer, shared);
  // The next call must not take the queries of a refused one for its predecessor's.
  if (!status.ok()) is_query_stale_ = true;
  if (!status.ok()) return status;
  {
    GateHold hold(mapped_memory_.gate(), slot_);
    if (!hold) return LeaseLost();
    status = PrepareQueries(*changed || std::exchange(is_query_stale_, false));
    if (status.ok()) {
      status = backend_->Attend(batch_, layer, shared);
      if (absl::IsDataLoss(status)) status = OutOfBounds(status);
    }
  }
  return Confirm(status);
}

absl::Status MappedStep::EndRead() {
  absl::Status status;
  {
    GateHold hold(mapped_memory_.gate(), slot_);
    if (!hold) return LeaseLost();
    // Before unpinning, as in a step.
    status = backend_->Settle(batch_);
    if (absl::IsDataLoss(status)) status = OutOfBounds(status);
    if (absl::IsAborted(status)) return status;
    if (!StillPinned()) return Aborted();
    MarkInStep(false);
    pinned_ = false;
    (void)shm::Unpin(mapped_memory_.control().readers[slot_].word, pin_);
  }
  Finish();
  return status;
}

}  // namespace tessera::client
