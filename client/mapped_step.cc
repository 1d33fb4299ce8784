#include "client/mapped_step.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "proto/shm/pin.h"
#include "proto/shm/tail_ring.h"

namespace tessera::client {

namespace {

constexpr std::size_t kWorkspaceAlignment = 64;

}  // namespace

void MappedStep::FreeAligned::operator()(std::byte* bytes) const { std::free(bytes); }

MappedStep::MappedStep(MappedDoor& door, const Surroundings& surroundings, std::uint32_t slot)
    : door_(door), surroundings_(surroundings), slot_(slot) {}

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
  const BoundModel& model = batch_.model();
  const shm::LaneLayout& layout = model.layout();
  const std::size_t row = model.row_bytes(layer);
  const std::size_t token = model.token_bytes(layer);
  for (StepItem& item : batch_.items()) {
    std::byte* const region = item.sequence->tail.region;
    for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
      const shm::TailRing ring = layout.ring(region, layer, head);
      std::size_t at = item.first_row * token + head * row;
      for (std::uint32_t i = 0; i < item.new_tokens; ++i, at += token) {
        shm::StoreRow(ring, item.base + i, key.data() + at, value.data() + at);
      }
    }
  }
  batch_.MarkAppended(layer);
  return absl::OkStatus();
}

absl::Status MappedStep::AttendRows(std::uint32_t layer, const StepTensors& tensors) {
  const BoundModel& model = batch_.model();
  const shm::LaneLayout& layout = model.layout();
  const kernels::LayerGeometry& geometry = model.geometry(layer);
  const std::size_t query_token = geometry.query_heads * model.row_bytes(layer);
  const std::size_t output_token = std::size_t{geometry.query_heads} * geometry.head_dim *
                                   kernels::ElementBytes(tensors.output_type);
  attend_items_.clear();
  for (StepItem& item : batch_.items()) {
    const std::uint64_t end = item.base + (batch_.appended(layer) ? item.new_tokens : 0);
    float* const lse =
        tensors.lse.empty() ? nullptr : tensors.lse.data() + item.first_row * geometry.query_heads;
    for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
      kernels::LaneView& lane = item.sequence->resolved.lanes[layout.lane(layer, head)];
      lane.tail.end = end;
      attend_items_.push_back({.lane = &lane,
                               .kv_head = head,
                               .queries = item.new_tokens,
                               .first_query_position = item.base,
                               .query = tensors.query.data() + item.first_row * query_token,
                               .output = tensors.output.data() + item.first_row * output_token,
                               .lse = lse});
    }
  }
  const kernels::AttendBatch batch = {.geometry = geometry,
                                      .causal = tensors.causal,
                                      .output_type = tensors.output_type,
                                      .items = attend_items_};
  kernels::AttendResult result = kernels::Attend(*surroundings_.implementation, batch,
                                                 {workspace_.get(), workspace_bytes_}, *executor_);
  if (result.status == kernels::AttendStatus::kWorkspaceTooSmall) {
    // Twice what is needed: lanes grow, and a steady decode shall not come here again and again.
    workspace_bytes_ = std::bit_ceil(2 * kernels::AttendWorkspaceBytes(batch));
    workspace_.reset(
        static_cast<std::byte*>(std::aligned_alloc(kWorkspaceAlignment, workspace_bytes_)));
    TESSERA_CHECK(workspace_ != nullptr, Concat("no memory for ", workspace_bytes_, " bytes"));
    result = kernels::Attend(*surroundings_.implementation, batch,
                             {workspace_.get(), workspace_bytes_}, *executor_);
  }
  if (result.status == kernels::AttendStatus::kOk) return absl::OkStatus();
  if (!StillPinned()) return Aborted();
  const StepItem& at = batch_.items()[result.item / geometry.kv_heads];
  return absl::InternalError(Concat(at.sequence->id.ToString(), ", layer ", layer,
                                    ": a tile is out of bounds or of an unknown format though the "
                                    "step's pin holds"));
}

absl::Status MappedStep::End(std::span<const std::uint32_t> accepted) {
  absl::Status status = batch_.CheckEnd(accepted);
  if (!status.ok()) return status;
  GateHold hold(door_.gate(), slot_);
  if (!hold) return LeaseLost();
  pinned_ = false;
  if (!shm::Unpin(door_.control().readers[slot_].word, pin_)) return Aborted();
  status = Commit(accepted);
  Finish();
  return status;
}

// After the pin has proved good: what was computed from is what was there.
absl::Status MappedStep::Commit(std::span<const std::uint32_t> accepted) {
  bool tile_filled = false;
  bool lost_tail = false;
  commits_.clear();
  for (std::size_t i = 0; i < batch_.items().size(); ++i) {
    const StepItem& item = batch_.items()[i];
    const std::uint64_t tokens = item.base + (accepted.empty() ? item.new_tokens : accepted[i]);
    const Tail& tail = item.sequence->tail;
    commits_.push_back({item.sequence->id, &tail, tokens});
    // Evicted, or closed by another worker's append: nobody would read what is stored here.
    lost_tail |= item.block->sequence_id.load() != item.sequence->id.value() ||
                 item.block->tail_generation.load() != tail.generation;
    // The daemon absorbs whole tiles' worth counted from where the tail was opened.
    tile_filled |= (tokens - tail.first_token) / kernels::kTileEntries >
                   (item.base - tail.first_token) / kernels::kTileEntries;
  }
  if (lost_tail || !door_.tails().Store(commits_)) {
    return absl::AbortedError(
        "a sequence of the step lost its tail while the step ran; nothing was committed");
  }
  for (std::size_t i = 0; i < commits_.size(); ++i) {
    batch_.items()[i].sequence->SetTokens(commits_[i].tokens);
  }
  if (tile_filled && door_.control().wake.exchange(0, std::memory_order_seq_cst) == 1) {
    door_.source().SignalWake();
  }
  return absl::OkStatus();
}

void MappedStep::Abandon() {
  GateHold hold(door_.gate(), slot_);
  // Nothing is committed, so it does not matter whether the pin held.
  if (hold && std::exchange(pinned_, false)) {
    (void)shm::Unpin(door_.control().readers[slot_].word, pin_);
  }
  Finish();
}

absl::Status MappedStep::Aborted() {
  for (StepItem& item : batch_.items()) item.sequence->resolved.version = 0;
  if (std::exchange(pinned_, false)) {
    (void)shm::Unpin(door_.control().readers[slot_].word, pin_);
  }
  Finish();
  return absl::AbortedError(
      "the daemon took this step's pin back: it was overdue, and memory was waiting for it; "
      "nothing was committed, do the step again");
}

absl::Status MappedStep::LeaseLost() {
  pinned_ = false;  // the slot is unmapped, and its session gone
  const absl::Status reason = session_->status();
  Finish();
  return reason;
}

void MappedStep::Finish() {
  batch_.Release();
  commits_.clear();
  open_ = false;
  door_.ReturnStep(slot_);
}

}  // namespace tessera::client
