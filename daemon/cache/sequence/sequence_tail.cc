// The tail of a decoding sequence: opened, absorbed tile by tile, closed.

#include <algorithm>
#include <optional>
#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::cache {

std::optional<std::uint64_t> TailHandle::CommittedTokens() const {
  const std::uint64_t word = commit_slot_.Load();
  if (!shm::CommitWord::Matches(word, generation_)) return std::nullopt;
  return shm::CommitWord::Tokens(word);
}

void TailHandle::PublishRingStart(std::uint64_t token) {
  MutexLock lock(mutex_);
  if (closed_) return;
  shm::Word& shown = reinterpret_cast<shm::SequenceBlock*>(block_->data())->ring_start;
  // Epochs may drain out of order, but the start must only move forward.
  if (token > shown.load()) shown.store(token);
}

void TailHandle::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
}

bool TailHandle::InStep() const {
  const std::uint64_t word = commit_slot_.Load();
  // A worker that claims to be in a step without a pin had its pin revoked; its result is
  // discarded.
  return shm::CommitWord::Matches(word, generation_) && shm::CommitWord::InStep(word) &&
         commit_slot_.WorkerPins();
}

absl::StatusOr<Sequence::OpenedTail> Sequence::OpenTail(TailMemory& memory, Control& control) {
  MutexLock lock(mutex_);
  if (absl::Status status = Resident(); !status.ok()) return status;
  if (absl::Status status = CloseTailLocked(); !status.ok()) return status;
  if (tail_blocks_ > 0) {
    return WithCause(absl::AbortedError(
                         Concat(id_.ToString(),
                                " is being compressed, which moves its tokens to other positions; "
                                "retry when that is done")),
                     ErrorCause::kSequenceBusy);
  }
  if (TokensMovedAhead() != 0) return PartlyMovedError();
  if (absl::Status status = MakeLanes(); !status.ok()) return status;
  const std::uint64_t tokens = TokensInSegments();
  for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
    const std::uint64_t held = lanes_[model_->layout().lane(layer, 0)].tail_start;
    if (held != tokens) {
      return absl::FailedPreconditionError(Concat("layer ", layer, " of ", id_.ToString(),
                                                  " holds ", held,
                                                  " tokens, but another layer holds ", tokens,
                                                  "; append the missing rows before decoding"));
    }
  }
  absl::StatusOr<TailRegion> region = memory.Allocate(model_->layout().tail_bytes());
  if (!region.ok()) return region.status();
  absl::StatusOr<CommitSlot> slot = control.TakeCommitSlot();
  if (!slot.ok()) return slot.status();
  tail_generation_ = slot->NextGeneration(tail_generation_);
  const OpenedTail opened = {.extent = region->extent(),
                             .extent_bytes = region->extent_bytes(),
                             .offset = region->offset(),
                             .commit_slot = slot->index(),
                             .generation = tail_generation_,
                             .tokens = tokens,
                             .position_shift = moved_.shift};
  block().ring_start.store(tokens);
  seen_committed_ = tokens;
  Used();
  {
    MutexLock tail_lock(tail_mutex_);
    tail_ = std::make_shared<TailHandle>(*std::move(region), *std::move(slot), tail_generation_,
                                         block_);
    counted_tokens_ = tokens;
  }
  block().tail_generation.store(tail_generation_);
  block().version.fetch_add(1);
  return opened;
}

// Returns the tokens of the sequence, including committed ones in the tail. An impossible count
// means that the worker is hostile or broken, and fails the sequence.
absl::StatusOr<std::uint64_t> Sequence::CommittedLocked() {
  const std::uint64_t in_segments = TokensInSegments();
  const std::shared_ptr<const TailHandle> tail = this->tail();
  if (tail == nullptr) return in_segments;
  const std::optional<std::uint64_t> committed = tail->CommittedTokens();
  if (!committed.has_value()) return in_segments;
  const std::uint64_t limit = in_segments + model_->layout().ring_capacity();
  if (*committed < in_segments || *committed > limit) {
    return Fail(Concat("its committed count is ", *committed, "; it must be between ", in_segments,
                       " and ", limit));
  }
  return *committed;
}

absl::StatusOr<std::uint64_t> Sequence::TokensOfLayer(std::uint32_t layer) {
  MutexLock lock(mutex_);
  if (absl::Status status = Usable(); !status.ok()) return status;
  const absl::StatusOr<std::uint64_t> committed = CommittedLocked();
  if (!committed.ok()) return committed.status();
  return std::max(*committed, LaneAt(model_->layout().lane(layer, 0)).tail_start);
}

absl::Status Sequence::AbsorbLocked(std::uint64_t upto) {
  const std::uint64_t from = TokensInSegments();
  std::shared_ptr<TailHandle> tail;
  {
    MutexLock lock(tail_mutex_);
    tail = tail_;
  }
  const TailRows rows(model_->layout(), tail->region().data(), from);
  Replaced replaced;
  const AppendSpan span = {0, model_->layers(), from, upto - from};
  const auto nobody = [] {};
  absl::Status status = AppendLocked(span, rows, nobody, replaced);
  if (!status.ok()) return status;
  // Readers pinned earlier may still use the ring rows, which are free once the epoch drains.
  FinishPublication(std::move(replaced), [weak = std::weak_ptr<TailHandle>(tail), upto]() {
    if (const std::shared_ptr<TailHandle> held = weak.lock()) held->PublishRingStart(upto);
  });
  memory_.counters->tail_tokens_absorbed.fetch_add(upto - from, std::memory_order_relaxed);
  return absl::OkStatus();
}

// In a dense lane, first fill the tile that the prompt left partial: then the tail mostly lies in
// one tile of the ring. After packed segments, count tiles from where the tail began, since these
// rows are packed next.
std::uint64_t Sequence::RowsInLastTile(const Lane& lane) {
  const auto packed = [](const HeldSegment& held) { return held.segment->shape().packed(); };
  if (!(lane.open || lane.MayReopen()) || std::ranges::any_of(lane.segments, packed)) return 0;
  return lane.segments.back().entries % kernels::kTileEntries;
}

absl::StatusOr<std::uint64_t> Sequence::AbsorbFullTiles() {
  // Ring rows absorbed earlier may be free by now. Collect at once, so that a fast worker does not
  // wait for the event loop.
  memory_.epochs->Collect();
  MutexLock lock(mutex_);
  if (freed_ || !failure_.empty() || tail() == nullptr) return std::uint64_t{0};
  absl::StatusOr<std::uint64_t> committed = CommittedLocked();
  if (!committed.ok()) return committed.status();
  const std::uint64_t from = TokensInSegments();
  const std::uint64_t begun = RowsInLastTile(lanes_.front());  // all lanes grow together
  const std::uint64_t rows = begun + *committed - from;
  if (rows < kernels::kTileEntries) return std::uint64_t{0};
  const std::uint64_t tokens = rows / kernels::kTileEntries * kernels::kTileEntries - begun;
  if (absl::Status status = AbsorbLocked(from + tokens); !status.ok()) return status;
  seen_committed_ = *committed;
  Used();
  return tokens;
}

absl::Status Sequence::AbsorbTail() {
  MutexLock lock(mutex_);
  if (absl::Status status = Usable(); !status.ok()) return status;
  if (tail() == nullptr) return absl::OkStatus();
  absl::StatusOr<std::uint64_t> committed = CommittedLocked();
  if (!committed.ok()) return committed.status();
  return *committed == TokensInSegments() ? absl::OkStatus() : AbsorbLocked(*committed);
}

absl::Status Sequence::CloseTail() {
  MutexLock lock(mutex_);
  if (freed_ || !failure_.empty()) return absl::OkStatus();
  return CloseTailLocked();
}

absl::Status Sequence::CloseTailLocked() {
  const std::shared_ptr<const TailHandle> tail = this->tail();
  if (tail == nullptr) return absl::OkStatus();
  // Written before the count is read: a worker that commits later sees that its tail is closed.
  block().tail_generation.store(0);
  const absl::StatusOr<std::uint64_t> committed = CommittedLocked();
  absl::Status status = committed.status();
  if (status.ok() && *committed > TokensInSegments()) status = AbsorbLocked(*committed);
  if (!status.ok()) {
    if (decoding()) block().tail_generation.store(tail->generation());
    return status;
  }
  DropTail();
  return absl::OkStatus();
}

// The worker writes the count, so it is bounded by what the rings hold.
std::uint64_t Sequence::CommittedForCounting() const {
  if (tail_ == nullptr) return 0;
  return std::min(
      tail_->CommittedTokens().value_or(0),
      published_tokens_.load(std::memory_order_relaxed) + model_->layout().ring_capacity());
}

std::uint64_t Sequence::CountTokens() const {
  MutexLock lock(tail_mutex_);
  return std::max(CommittedForCounting(), published_tokens_.load(std::memory_order_relaxed));
}

void Sequence::CountCommitted() {
  MutexLock lock(tail_mutex_);
  const std::uint64_t committed = CommittedForCounting();
  if (committed <= counted_tokens_) return;
  memory_.counters->tokens_committed.fetch_add(committed - counted_tokens_,
                                               std::memory_order_relaxed);
  counted_tokens_ = committed;
}

// Tokens that were not absorbed are lost with the tail.
void Sequence::DropTail() {
  CountCommitted();
  std::shared_ptr<TailHandle> tail;
  {
    MutexLock lock(tail_mutex_);
    tail = std::exchange(tail_, nullptr);
  }
  if (tail == nullptr) return;
  tail->Close();
  block().tail_generation.store(0);
  block().version.fetch_add(1);
  // Pinned readers may still read the rings; the region is released when they are done.
  memory_.epochs->Retire([tail = std::move(tail)]() mutable { tail = nullptr; }, 0);
}

}  // namespace tessera::cache
