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

std::unique_ptr<StepBackend> NewBackend(MappedMemory& mapped, const Environment& environment) {
  if (mapped.gpu() != nullptr) return std::make_unique<GpuBackend>(*mapped.gpu(), mapped.extents());
  return std::make_unique<HostBackend>(*environment.implementation);
}

}  // namespace

absl::StatusOr<MappedStep*> MappedStep::Take(MappedMemory& mapped, const Environment& environment) {
  const absl::StatusOr<std::uint32_t> slot = mapped.TakeSlot();
  if (!slot.ok()) return slot.status();
  std::unique_ptr<SlotState>& kept = mapped.StateOf(*slot);
  if (kept == nullptr) kept = std::make_unique<MappedStep>(mapped, environment, *slot);
  return static_cast<MappedStep*>(kept.get());
}

MappedStep::MappedStep(MappedMemory& mapped, const Environment& environment, std::uint32_t slot)
    : mapped_memory_(mapped),
      environment_(environment),
      slot_(slot),
      backend_(NewBackend(mapped, environment)) {}

bool MappedStep::StillPinned() const {
  return mapped_memory_.control().readers[slot_].word.load(std::memory_order_seq_cst) == pin_;
}

absl::Status MappedStep::Append(std::uint32_t layer, std::span<const std::byte> key,
                                std::span<const std::byte> value) {
  absl::Status status = batch_.CheckAppend(layer, key, value);
  if (!status.ok()) return status;
  GateHold hold(mapped_memory_.gate(), slot_);
  if (!hold) return LeaseLost();
  return AppendRows(layer, key, value);
}

absl::Status MappedStep::Attend(std::uint32_t layer, const StepTensors& tensors) {
  absl::Status status = batch_.CheckAttend(layer, tensors);
  if (!status.ok()) return status;
  {
    GateHold hold(mapped_memory_.gate(), slot_);
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
    GateHold hold(mapped_memory_.gate(), slot_);
    if (!hold) return LeaseLost();
    status = AppendRows(layer, tensors.key, tensors.value);
    if (status.ok()) status = AttendRows(layer, tensors);
  }
  return Confirm(status);
}

// The pins of an ended session protect nothing, and this client may not have seen its end yet.
absl::Status MappedStep::Confirm(const absl::Status& status) const {
  if (!absl::IsInternal(status)) return status;
  v1::StatsRequest request;
  v1::StatsResponse response;
  const absl::Status alive = session_->Call(request, response);
  return absl::IsUnavailable(alive) ? alive : status;
}

absl::Status MappedStep::AppendRows(std::uint32_t layer, std::span<const std::byte> key,
                                    std::span<const std::byte> value) {
  // After a revocation the rings may belong to another sequence, so check before writing.
  if (!StillPinned()) return Aborted();
  absl::Status status = backend_->Append(batch_, layer, key, value);
  if (status.ok()) batch_.MarkAppended(layer);
  return status;
}

absl::Status MappedStep::AttendRows(std::uint32_t layer, const StepTensors& tensors) {
  // The host cannot read GPU memory: such queries are observed when the step has settled.
  if (mapped_memory_.gpu() == nullptr) {
    absl::Status status = batch_.Observe(layer, tensors.query, StepBatch::QueryRows::kAll);
    if (!status.ok()) return status;
  }
  const absl::Status status = backend_->Attend(batch_, layer, tensors);
  return absl::IsDataLoss(status) ? OutOfBounds(status) : status;
}

absl::Status MappedStep::OutOfBounds(const absl::Status& where) {
  if (!StillPinned()) return Aborted();
  return absl::InternalError(Concat(AsStringView(where.message()),
                                    ": a tile is out of bounds or has an unknown format, although "
                                    "the step's pin holds"));
}

absl::Status MappedStep::End(std::span<const std::uint32_t> accepted) {
  absl::Status status = batch_.CheckEnd(accepted);
  if (!status.ok()) return status;
  {
    GateHold hold(mapped_memory_.gate(), slot_);
    if (!hold) return LeaseLost();
    // Before unpinning: until then the pin protects the memory that the kernels read.
    status = backend_->Settle(batch_);
    if (absl::IsDataLoss(status)) status = OutOfBounds(status);
    if (absl::IsAborted(status)) return status;
    if (!StillPinned()) return Aborted();
    if (status.ok()) status = ObserveSettled();
    // Also before unpinning: without a pin the step counts as dead, and its tails may be closed
    // without the new tokens.
    if (status.ok()) status = Commit(accepted);
    if (!status.ok()) batch_.ForgetRows();
    MarkInStep(false);
    pinned_ = false;
    (void)shm::Unpin(mapped_memory_.control().readers[slot_].word, pin_);
  }
  if (status.ok() && is_commit_uncertain_) status = ResolveCommit();
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

// False if a tail was evicted or closed by another worker's append: the daemon would not read what
// is stored there.
bool MappedStep::AreTailsOpen() const {
  const auto& items = batch_.items();
  return std::all_of(items.begin(), items.end(), [](const StepItem& item) {
    return item.block->sequence_id.load() == item.sequence->id.value() &&
           item.block->tail_generation.load() == item.sequence->tail.generation;
  });
}

// Called after the pin has proved valid, so the step has read consistent data.
absl::Status MappedStep::Commit(std::span<const std::uint32_t> accepted) {
  bool tile_filled = false;
  commits_.clear();
  for (std::size_t i = 0; i < batch_.items().size(); ++i) {
    const StepItem& item = batch_.items()[i];
    const std::uint64_t tokens = item.base + (accepted.empty() ? item.new_tokens : accepted[i]);
    const Tail& tail = item.sequence->tail;
    commits_.push_back({item.sequence->id, &tail, tokens});
    // The daemon absorbs whole tiles, counted from token 0 or from the tail's first token.
    for (const std::uint64_t first : {std::uint64_t{0}, tail.first_token}) {
      tile_filled |=
          (tokens - first) / kernels::kTileEntries > (item.base - first) / kernels::kTileEntries;
    }
  }
  if (!AreTailsOpen() || !mapped_memory_.tails().Store(commits_)) {
    MarkInStep(false);
    return absl::AbortedError(
        "a sequence lost its tail during the step; nothing was committed, repeat the step");
  }
  // The daemon closes a tail by removing its generation, and then reads the count. So the count of
  // a tail that is still open after the store has not been read before it.
  is_commit_uncertain_ = !AreTailsOpen();
  marked_ = false;
  for (std::size_t i = 0; i < commits_.size(); ++i) {
    batch_.items()[i].sequence->SetTokens(commits_[i].tokens);
  }
  if (tile_filled && mapped_memory_.control().wake.exchange(0, std::memory_order_seq_cst) == 1) {
    mapped_memory_.source().SignalWake();
  }
  return absl::OkStatus();
}

absl::Status MappedStep::ResolveCommit() {
  bool all = true;
  bool changed = false;  // by another caller: the step was computed for other positions
  for (std::size_t i = 0; i < batch_.items().size(); ++i) {
    SequenceState& sequence = *batch_.items()[i].sequence;
    if (absl::Status status = RefreshTokens(*session_, sequence); !status.ok()) {
      for (const StepItem& item : batch_.items()) item.sequence->uncertain = true;
      return WithMessage(status, Concat("the tail of ", sequence.id.ToString(),
                                        " was closed during the commit, and whether the step "
                                        "counts could not be determined: ",
                                        AsStringView(status.message())));
    }
    const bool counts = sequence.tokens == commits_[i].tokens;
    all &= counts;
    changed |= !counts && sequence.tokens != batch_.items()[i].base;
  }
  return all ? absl::OkStatus() : RollBack(changed);
}

// A step counts in all of its sequences or in none.
absl::Status MappedStep::RollBack(bool changed) {
  for (std::size_t i = 0; i < batch_.items().size() && !changed; ++i) {
    const StepItem& item = batch_.items()[i];
    SequenceState& sequence = *item.sequence;
    if (sequence.tokens == item.base) continue;
    if (absl::Status status = TruncateTo(*session_, sequence.id, item.base); !status.ok()) {
      return absl::FailedPreconditionError(
          Concat("sequences lost their tails during the commit; ", sequence.id.ToString(),
                 " holds the new tokens, others do not (read tokens() of each), and the tokens "
                 "could not be removed: ",
                 AsStringView(status.message())));
    }
    sequence.SetTokens(item.base);
  }
  if (changed) {
    return absl::FailedPreconditionError(
        "sequences lost their tails during the commit, and another caller has changed them; read "
        "tokens() of each");
  }
  return absl::AbortedError(
      "sequences lost their tails during the commit; nothing was committed, repeat the step");
}

void MappedStep::Abandon() {
  GateHold hold(mapped_memory_.gate(), slot_);
  (void)backend_->Settle(batch_);
  if (!batch_.is_reading()) batch_.ForgetRows();
  // Nothing is committed, so the pin need not have held.
  if (hold) MarkInStep(false);
  if (hold && std::exchange(pinned_, false)) {
    (void)shm::Unpin(mapped_memory_.control().readers[slot_].word, pin_);
  }
  Finish();
}

absl::Status MappedStep::Aborted() {
  (void)backend_->Settle(batch_);
  const bool is_read = batch_.is_reading();
  if (!is_read) batch_.ForgetRows();
  for (StepItem& item : batch_.items()) item.sequence->resolved.version = 0;
  MarkInStep(false);
  if (std::exchange(pinned_, false)) {
    (void)shm::Unpin(mapped_memory_.control().readers[slot_].word, pin_);
  }
  Finish();
  return WithCause(
      absl::AbortedError(
          is_read ? "the daemon revoked this read's pin: it was held for too long while memory "
                    "waited to be freed; repeat the read"
                  : "the daemon revoked this step's pin: it was held for too long while memory "
                    "waited to be freed; nothing was committed, repeat the step"),
      ErrorCause::kPinRevoked);
}

absl::Status MappedStep::LeaseLost() {
  pinned_ = marked_ = false;  // the slot is unmapped, and its session has ended
  (void)backend_->Settle(batch_);
  const absl::Status reason = session_->status();
  Finish();
  return reason;
}

void MappedStep::Finish() {
  batch_.Release();
  commits_.clear();
  open_ = marked_ = is_backend_begun_ = is_query_stale_ = is_commit_uncertain_ = false;
}

void MappedStep::Release() { mapped_memory_.ReturnSlot(slot_); }

}  // namespace tessera::client
