#include "client/step/mapped_step.h"

#include <algorithm>
#include <utility>

#include "client/error/error_info.h"
#include "client/sequence/bulk_append.h"
#include "client/step/gpu_backend.h"
#include "client/step/host_backend.h"
#include "daemon/base/strings.h"
#include "proto/shm/pin.h"

namespace tessera::client {

namespace {

std::unique_ptr<StepBackend> NewBackend(MappedMemory& door, const Environment& environment) {
  if (door.gpu() != nullptr) return std::make_unique<GpuBackend>(*door.gpu(), door.extents());
  return std::make_unique<HostBackend>(*environment.implementation);
}

}  // namespace

absl::StatusOr<MappedStep*> MappedStep::Take(MappedMemory& door, const Environment& environment) {
  const absl::StatusOr<std::uint32_t> slot = door.TakeSlot();
  if (!slot.ok()) return slot.status();
  std::unique_ptr<SlotState>& kept = door.StateOf(*slot);
  if (kept == nullptr) kept = std::make_unique<MappedStep>(door, environment, *slot);
  return static_cast<MappedStep*>(kept.get());
}

MappedStep::MappedStep(MappedMemory& door, const Environment& environment, std::uint32_t slot)
    : door_(door),
      environment_(environment),
      slot_(slot),
      backend_(NewBackend(door, environment)) {}

bool MappedStep::StillPinned() const {
  return door_.control().readers[slot_].word.load(std::memory_order_seq_cst) == pin_;
}

absl::Status MappedStep::Append(std::uint32_t layer, std::span<const std::byte> key,
                                std::span<const std::byte> value) {
  absl::Status status = batch_.CheckAppend(layer, key, value);
  if (!status.ok()) return status;
  GateHold hold(door_.gate(), slot_);
  if (!hold) return LeaseLost();
  return AppendRows(layer, key, value);
}

absl::Status MappedStep::Attend(std::uint32_t layer, const StepTensors& tensors) {
  absl::Status status = batch_.CheckAttend(layer, tensors);
  if (!status.ok()) return status;
  {
    GateHold hold(door_.gate(), slot_);
    if (!hold) return LeaseLost();
    status = AttendRows(layer, tensors);
  }
  return Confirm(status);
}

absl::Status MappedStep::AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) {
  absl::Status status = batch_.CheckAppend(layer, tensors.key, tensors.value);
  if (status.ok()) status = batch_.CheckAttend(layer, tensors);
  if (!status.ok()) return status;
  {
    GateHold hold(door_.gate(), slot_);
    if (!hold) return LeaseLost();
    status = AppendRows(layer, tensors.key, tensors.value);
    if (status.ok()) status = AttendRows(layer, tensors);
  }
  return Confirm(status);
}

// The pins of a session that has ended protect nothing, and its end may not have been seen here.
absl::Status MappedStep::Confirm(const absl::Status& status) const {
  if (!absl::IsInternal(status)) return status;
  v1::StatsRequest request;
  v1::StatsResponse response;
  const absl::Status alive = session_->Call(request, response);
  return absl::IsUnavailable(alive) ? alive : status;
}

absl::Status MappedStep::AppendRows(std::uint32_t layer, std::span<const std::byte> key,
                                    std::span<const std::byte> value) {
  // A revoked pin no longer keeps the rings from being given away; look before writing there.
  if (!StillPinned()) return Aborted();
  absl::Status status = backend_->Append(batch_, layer, key, value);
  if (status.ok()) batch_.MarkAppended(layer);
  return status;
}

absl::Status MappedStep::AttendRows(std::uint32_t layer, const StepTensors& tensors) {
  // A GPU's memory cannot be read here: its queries come when the step has settled.
  if (door_.gpu() == nullptr) {
    absl::Status status = batch_.Observe(layer, tensors.query, StepBatch::QueryRows::kAll);
    if (!status.ok()) return status;
  }
  const absl::Status status = backend_->Attend(batch_, layer, tensors);
  return absl::IsDataLoss(status) ? OutOfBounds(status) : status;
}

absl::Status MappedStep::OutOfBounds(const absl::Status& where) {
  if (!StillPinned()) return Aborted();
  return absl::InternalError(Concat(AsStringView(where.message()),
                                    ": a tile is out of bounds or of an unknown format though the "
                                    "step's pin holds"));
}

absl::Status MappedStep::End(std::span<const std::uint32_t> accepted) {
  absl::Status status = batch_.CheckEnd(accepted);
  if (!status.ok()) return status;
  {
    GateHold hold(door_.gate(), slot_);
    if (!hold) return LeaseLost();
    // Before the pin goes: until then it keeps what the kernels read.
    status = backend_->Settle(batch_);
    if (absl::IsDataLoss(status)) status = OutOfBounds(status);
    if (absl::IsAborted(status)) return status;
    if (!StillPinned()) return Aborted();
    if (status.ok()) status = ObserveSettled();
    // Under the pin, too: a step whose worker has none counts as dead, and its tails may be closed
    // with the tokens that they had before it.
    if (status.ok()) status = Commit(accepted);
    if (!status.ok()) batch_.ForgetRows();
    MarkInStep(false);
    pinned_ = false;
    (void)shm::Unpin(door_.control().readers[slot_].word, pin_);
  }
  if (status.ok() && doubtful_) status = AskWhatCounts();
  Finish();
  return status;
}

absl::Status MappedStep::ObserveSettled() {
  for (std::uint32_t layer = 0; layer < batch_.model().layers(); ++layer) {
    const std::span<const std::byte> queries = backend_->SettledQueries(layer);
    if (queries.empty()) continue;
    absl::Status status = batch_.Observe(layer, queries, StepBatch::QueryRows::kObserved);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Evicted, or closed by another worker's append: nobody would read what is stored there.
bool MappedStep::TailsStand() const {
  const auto& items = batch_.items();
  return std::all_of(items.begin(), items.end(), [](const StepItem& item) {
    return item.block->sequence_id.load() == item.sequence->id.value() &&
           item.block->tail_generation.load() == item.sequence->tail.generation;
  });
}

// After the pin has proved good: what was computed from is what was there.
absl::Status MappedStep::Commit(std::span<const std::uint32_t> accepted) {
  bool tile_filled = false;
  commits_.clear();
  for (std::size_t i = 0; i < batch_.items().size(); ++i) {
    const StepItem& item = batch_.items()[i];
    const std::uint64_t tokens = item.base + (accepted.empty() ? item.new_tokens : accepted[i]);
    const Tail& tail = item.sequence->tail;
    commits_.push_back({item.sequence->id, &tail, tokens});
    // The daemon absorbs what fills tiles: as tokens count, or from where the tail was opened.
    for (const std::uint64_t first : {std::uint64_t{0}, tail.first_token}) {
      tile_filled |=
          (tokens - first) / kernels::kTileEntries > (item.base - first) / kernels::kTileEntries;
    }
  }
  if (!TailsStand() || !door_.tails().Store(commits_)) {
    MarkInStep(false);
    return absl::AbortedError(
        "a sequence of the step lost its tail while the step ran; nothing was committed");
  }
  // Whoever closes a tail takes its generation away, then reads the count. A tail that stands after
  // the store was not read before it.
  doubtful_ = !TailsStand();
  marked_ = false;
  for (std::size_t i = 0; i < commits_.size(); ++i) {
    batch_.items()[i].sequence->SetTokens(commits_[i].tokens);
  }
  if (tile_filled && door_.control().wake.exchange(0, std::memory_order_seq_cst) == 1) {
    door_.source().SignalWake();
  }
  return absl::OkStatus();
}

absl::Status MappedStep::AskWhatCounts() {
  bool all = true;
  bool changed = false;  // by another one, too: the step was computed for other positions
  for (std::size_t i = 0; i < batch_.items().size(); ++i) {
    SequenceState& sequence = *batch_.items()[i].sequence;
    if (absl::Status status = RefreshTokens(*session_, sequence); !status.ok()) {
      for (const StepItem& item : batch_.items()) item.sequence->uncertain = true;
      return WithMessage(status, Concat("whether the step counts in ", sequence.id.ToString(),
                                        ", whose tail went at its end, could not be asked: ",
                                        AsStringView(status.message())));
    }
    const bool counts = sequence.tokens == commits_[i].tokens;
    all &= counts;
    changed |= !counts && sequence.tokens != batch_.items()[i].base;
  }
  return all ? absl::OkStatus() : TakeBack(changed);
}

// A step counts in all of its sequences or in none.
absl::Status MappedStep::TakeBack(bool changed) {
  for (std::size_t i = 0; i < batch_.items().size() && !changed; ++i) {
    const StepItem& item = batch_.items()[i];
    SequenceState& sequence = *item.sequence;
    if (sequence.tokens == item.base) continue;
    if (absl::Status status = CutTo(*session_, sequence.id, item.base); !status.ok()) {
      return absl::FailedPreconditionError(
          Concat("sequences of the step lost their tails at its end; ", sequence.id.ToString(),
                 " holds its tokens, others do not (see their tokens()), and they could not be "
                 "taken back: ",
                 AsStringView(status.message())));
    }
    sequence.SetTokens(item.base);
  }
  if (changed) {
    return absl::FailedPreconditionError(
        "sequences of the step lost their tails at its end, and another one has changed them; see "
        "their tokens()");
  }
  return absl::AbortedError(
      "sequences of the step lost their tails at its end; nothing counts, do the step again");
}

void MappedStep::Abandon() {
  GateHold hold(door_.gate(), slot_);
  (void)backend_->Settle(batch_);
  batch_.ForgetRows();
  // Nothing is committed, so it does not matter whether the pin held.
  if (hold) MarkInStep(false);
  if (hold && std::exchange(pinned_, false)) {
    (void)shm::Unpin(door_.control().readers[slot_].word, pin_);
  }
  Finish();
}

absl::Status MappedStep::Aborted() {
  (void)backend_->Settle(batch_);
  batch_.ForgetRows();
  for (StepItem& item : batch_.items()) item.sequence->resolved.version = 0;
  MarkInStep(false);
  if (std::exchange(pinned_, false)) {
    (void)shm::Unpin(door_.control().readers[slot_].word, pin_);
  }
  Finish();
  return WithCause(
      absl::AbortedError(
          "the daemon took this step's pin back: it was overdue, and memory was waiting for it; "
          "nothing was committed, do the step again"),
      ErrorCause::kPinRevoked);
}

absl::Status MappedStep::LeaseLost() {
  pinned_ = marked_ = false;  // the slot is unmapped, and its session gone
  (void)backend_->Settle(batch_);
  const absl::Status reason = session_->status();
  Finish();
  return reason;
}

void MappedStep::Finish() {
  batch_.Release();
  commits_.clear();
  open_ = marked_ = doubtful_ = false;
}

void MappedStep::Release() { door_.ReturnSlot(slot_); }

}  // namespace tessera::client
