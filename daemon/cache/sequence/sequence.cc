#include "daemon/cache/sequence/sequence.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

namespace {
// Entries of tables, the block that tail handles share, and what the allocator adds.
constexpr std::uint64_t kBesideSequence = 512;
// With a list of one segment.
constexpr std::uint64_t kLaneBytes = sizeof(Lane) + 2 * sizeof(HeldSegment);
}  // namespace

std::uint64_t Sequence::Replaced::bytes() const {
  std::uint64_t sum = 0;
  for (const pool::Block& block : blocks) sum += block.bytes();
  for (const std::shared_ptr<Segment>& segment : segments) {
    if (segment.use_count() == 1) sum += segment->tile_bytes();
  }
  return sum;
}

absl::StatusOr<std::shared_ptr<Sequence>> Sequence::Create(const TenantMemory& memory,
                                                           SequenceId id,
                                                           std::shared_ptr<const Model> model,
                                                           SessionId owner) {
  absl::StatusOr<pool::Charge> charge =
      memory.heap->Reserve(pool::MemoryTag::kState, sizeof(Sequence) + kBesideSequence);
  if (!charge.ok()) return charge.status();
  absl::StatusOr<pool::Block> block = memory.directory->AllocateSequenceBlock(model->lanes());
  if (!block.ok()) return block.status();
  return std::shared_ptr<Sequence>(
      new Sequence(memory, id, std::move(model), owner, *std::move(block), *std::move(charge)));
}

Sequence::Sequence(const TenantMemory& memory, SequenceId id, std::shared_ptr<const Model> model,
                   SessionId owner, pool::Block block, pool::Charge charge)
    : memory_(memory),
      id_(id),
      model_(std::move(model)),
      block_(std::make_shared<pool::Block>(std::move(block))),
      block_offset_(block_->offset()),
      owner_(owner.value()),
      charge_(std::move(charge)),
      last_use_(memory.clock->Now()) {
  shm::SequenceBlock& shown = this->block();
  shown.lanes = model_->lanes();
  shown.layers = model_->layers();
  shown.state.store(shm::kSequenceLive);
  shown.version.store(1);
  shown.sequence_id.store(id_.value());
}

Sequence::~Sequence() { Free(); }

shm::SequenceBlock& Sequence::block() const {
  return *reinterpret_cast<shm::SequenceBlock*>(block_->data());
}

shm::Word* Sequence::lane_words() const {
  return reinterpret_cast<shm::Word*>(block_->data() + sizeof(shm::SequenceBlock));
}

absl::Status Sequence::MakeLanes() {
  if (!lanes_.empty()) return absl::OkStatus();
  absl::StatusOr<pool::Charge> charge =
      memory_.heap->Reserve(pool::MemoryTag::kState, model_->lanes() * kLaneBytes);
  if (!charge.ok()) return charge.status();
  if (const std::shared_ptr<Companion> companion = this->companion()) {
    if (absl::Status status = companion->MakeLanes(); !status.ok()) return status;
  }
  lanes_charge_ = *std::move(charge);
  lanes_ = std::vector<Lane>(model_->lanes());
  return absl::OkStatus();
}

void Sequence::DropLanes() {
  lanes_ = std::vector<Lane>();
  lanes_charge_.Reset();
}

const Lane& Sequence::LaneAt(std::uint32_t lane) const {
  static const Lane* const kEmpty = new Lane();
  return lanes_.empty() ? *kEmpty : lanes_[lane];
}

bool Sequence::has_lanes() const {
  MutexLock lock(mutex_);
  return !lanes_.empty();
}

bool Sequence::failed() const {
  MutexLock lock(mutex_);
  return !failure_.empty();
}

absl::Status Sequence::Usable() const {
  if (freed_) return absl::NotFoundError(Concat(id_.ToString(), " has been freed"));
  if (!failure_.empty()) {
    return WithCause(
        absl::FailedPreconditionError(Concat(id_.ToString(), " has failed: ", failure_)),
        ErrorCause::kSequenceFailed);
  }
  return absl::OkStatus();
}

absl::Status Sequence::Fail(std::string why) {
  failure_ = std::move(why);
  block().state.store(shm::kSequenceFailed);
  block().version.fetch_add(1);
  memory_.counters->sequences_failed.fetch_add(1, std::memory_order_relaxed);
  DropTail();
  return WithCause(absl::DataLossError(Concat(id_.ToString(), " has failed: ", failure_)),
                   ErrorCause::kSequenceFailed);
}

std::uint64_t Sequence::TokensInSegments() const {
  std::uint64_t tokens = LaneAt(0).tail_start;
  for (const Lane& lane : lanes_) tokens = std::min(tokens, lane.tail_start);
  return tokens;
}

absl::StatusOr<std::shared_ptr<Sequence>> Sequence::Fork(SequenceId id, SessionId owner) {
  absl::StatusOr<std::shared_ptr<Sequence>> child;  // outlives the locks
  MutexLock lock(mutex_);
  if (absl::Status status = Resident(); !status.ok()) return status;
  absl::StatusOr<std::uint64_t> committed = CommittedLocked();
  if (!committed.ok()) return committed.status();
  const std::uint64_t in_segments = TokensInSegments();
  child = Create(memory_, id, model_, owner);
  if (!child.ok()) return child.status();

  MutexLock child_lock((*child)->mutex_);
  if (!lanes_.empty()) {
    if (absl::Status status = (*child)->MakeLanes(); !status.ok()) return status;
  }
  if (absl::Status status = JoinForFork(**child, *committed - in_segments); !status.ok()) {
    return status;
  }
  if (absl::Status status = (*child)->CopyLanesOf(*this, in_segments); !status.ok()) return status;
  if (const std::shared_ptr<const TailHandle> tail = this->tail();
      tail != nullptr && *committed > in_segments) {
    const TailRows rows(model_->layout(), tail->region().data(), in_segments);
    Replaced replaced;
    const AppendSpan span = {0, model_->layers(), in_segments, *committed - in_segments};
    const auto nobody = [] {};
    if (absl::Status status = (*child)->AppendLocked(span, rows, nobody, replaced); !status.ok()) {
      // Values that the child must not hold, the parent must not hold either.
      return status.code() == absl::StatusCode::kDataLoss ? Fail(std::string((*child)->failure_))
                                                          : status;
    }
    (*child)->FinishPublication(std::move(replaced));
  }
  for (Lane& lane : lanes_) lane.open = lane.growing = false;  // shared from now on
  (*child)->step_begin_ = step_begin_;
  (*child)->step_end_ = step_end_;
  if (has_manual_changes()) (*child)->set_has_manual_changes();
  (*child)->set_prefix(prefix());
  return child;
}

absl::Status Sequence::CopyLanesOf(const Sequence& parent, std::uint64_t tokens) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].segments = parent.lanes_[i].segments;
    lanes_[i].losses = parent.lanes_[i].losses;
    lanes_[i].entries = parent.lanes_[i].entries;
    lanes_[i].tail_start = parent.lanes_[i].tail_start;
    lanes_[i].moved = parent.lanes_[i].moved;
  }
  moved_ = parent.moved_;
  if (absl::Status status = MayCut(tokens); !status.ok()) return status;
  absl::StatusOr<std::vector<pool::Block>> snapshots = ReserveSnapshots(0);
  if (!snapshots.ok()) return snapshots.status();
  CutLanes(tokens, *std::move(snapshots));
  return absl::OkStatus();
}

absl::Status Sequence::Truncate(std::uint64_t tokens, absl::FunctionRef<void()> before_seen) {
  MutexLock lock(mutex_);
  if (absl::Status status = Resident(); !status.ok()) return status;
  absl::StatusOr<std::uint64_t> held = CommittedLocked();
  if (!held.ok()) return held.status();
  if (tokens > *held) {
    return absl::OutOfRangeError(
        Concat(id_.ToString(), " holds ", *held, " tokens; it cannot be truncated to ", tokens));
  }
  if (absl::Status status = MayCut(tokens); !status.ok()) return status;
  // Reserved before the tail is closed, so that a refused truncation leaves the sequence decoding.
  const std::size_t of_tail =
      decoding() ? 1 + model_->layout().ring_capacity() / kMaxSegmentEntries : 0;
  absl::StatusOr<std::vector<pool::Block>> snapshots = ReserveSnapshots(of_tail);
  if (!snapshots.ok()) return snapshots.status();
  if (absl::Status status = CloseTailLocked(); !status.ok()) return status;
  before_seen();
  CutLanes(tokens, *std::move(snapshots));
  if (tokens == 0) has_manual_changes_.store(false);
  return absl::OkStatus();
}

// One snapshot per lane, with room for that many additional segments.
absl::StatusOr<std::vector<pool::Block>> Sequence::ReserveSnapshots(std::size_t more_segments) {
  std::vector<pool::Block> snapshots;
  for (const Lane& lane : lanes_) {
    const std::size_t segments =
        std::min<std::size_t>(lane.segments.size() + more_segments, shm::kMaxSegments);
    absl::StatusOr<pool::Block> snapshot =
        memory_.directory->AllocateSnapshot(static_cast<std::uint32_t>(segments));
    if (!snapshot.ok()) return snapshot.status();
    snapshots.push_back(*std::move(snapshot));
  }
  return snapshots;
}

absl::Status Sequence::MayCut(std::uint64_t tokens) const {
  const std::uint64_t moved = std::max(moved_.until, TokensMovedAhead());
  if (tokens > 0 && tokens < moved) {
    return absl::FailedPreconditionError(
        Concat(id_.ToString(), " has moved its first ", moved,
               " tokens to other positions and cannot be truncated to ", tokens,
               ", inside that range; truncate to 0 or to a later token"));
  }
  for (const Lane& lane : lanes_) {
    for (const HeldSegment& held : lane.segments) {
      const EntryList* const list = held.segment->entry_list();
      if (list == nullptr || list->merged_until <= tokens) continue;
      const std::uint64_t first = held.segment->first_position();
      if (first >= tokens) continue;  // all of it is cut off
      return absl::FailedPreconditionError(
          Concat(id_.ToString(), " has merged tokens ", first, " to ", list->merged_until,
                 " and cannot be truncated to ", tokens, " tokens, inside that range"));
    }
  }
  return absl::OkStatus();
}

// Cuts every lane to its part of the first `tokens` tokens, and publishes it.
void Sequence::CutLanes(std::uint64_t tokens, std::vector<pool::Block> snapshots) {
  step_end_ = std::min(step_end_, tokens);
  if (tokens == 0) {
    moved_ = {};
    for (Lane& lane : lanes_) lane.moved = {};
  }
  Replaced replaced;
  const auto drained = std::make_shared<std::atomic<bool>>(false);
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    lane.losses += lane.tail_start > tokens;
    while (!lane.segments.empty() && lane.segments.back().end_position() > tokens) {
      HeldSegment& last = lane.segments.back();
      const std::uint32_t left = last.EntriesBefore(tokens);
      lane.cut_readers_done = drained;
      lane.entries -= last.entries - left;
      lane.open = false;  // older snapshots still show rows beyond the cut
      if (!last.segment->appendable()) lane.growing = false;
      if (left == 0) {
        replaced.segments.push_back(std::move(last.segment));
        lane.segments.pop_back();
      } else {
        last.entries = left;
      }
    }
    lane.tail_start = std::min(lane.tail_start, tokens);
    PublishLane(i, std::move(snapshots[i]), replaced);
  }
  FinishPublication(std::move(replaced), [drained] { drained->store(true); });
}

std::shared_ptr<Companion> Sequence::companion() const {
  MutexLock lock(companion_mutex_);
  return companion_;
}

void Sequence::set_companion(std::shared_ptr<Companion> companion) {
  MutexLock lock(mutex_);  // so that no rows arrive in between
  if (companion != nullptr && !lanes_.empty()) (void)companion->MakeLanes();
  MutexLock companion_lock(companion_mutex_);
  companion_.swap(companion);
}

void Sequence::set_prefix(ForkHold hold) {
  MutexLock lock(companion_mutex_);
  std::swap(prefix_, hold);
}

ForkHold Sequence::prefix() const {
  MutexLock lock(companion_mutex_);
  return prefix_;
}

void Sequence::Free() {
  const ForkHold hold = prefix();  // released after the lock, like the companion
  std::shared_ptr<Companion> companion;
  MutexLock lock(mutex_);
  if (std::exchange(freed_, true)) return;
  {
    MutexLock companion_lock(companion_mutex_);
    companion = std::exchange(companion_, nullptr);
  }
  set_prefix(ForkHold());
  // First, because a reader that finds no tail must not take the lanes for the whole sequence.
  block().state.store(shm::kSequenceGone);
  block().sequence_id.store(0);
  DropTail();
  Replaced replaced;
  for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
    lane_words()[i].store(0);
    if (lanes_[i].snapshot.valid()) replaced.blocks.push_back(std::move(lanes_[i].snapshot));
    for (HeldSegment& held : lanes_[i].segments) {
      replaced.segments.push_back(std::move(held.segment));
    }
  }
  DropLanes();
  charge_.Reset();
  // The block is freed with its last holder: this sequence or the epoch's closure.
  FinishPublication(std::move(replaced), [block = block_]() {});
}

std::shared_ptr<const TailHandle> Sequence::tail() const {
  MutexLock lock(tail_mutex_);
  return tail_;
}

std::vector<SegmentRun> Sequence::Form() const {
  std::vector<SegmentRun> form;
  MutexLock lock(mutex_);
  for (const Lane& lane : lanes_) AddRuns(RunsOf(lane), form);
  return form;
}

namespace {

void ListEntries(const Lane& lane, Sequence::LaneDescription& out) {
  for (const HeldSegment& held : lane.segments) {
    const EntryList* const list = held.segment->entry_list();
    for (std::uint32_t entry = 0; entry < held.entries; ++entry) {
      out.positions.push_back(held.segment->PositionOf(entry));
      out.weights.push_back(list == nullptr || list->weights.empty() ? 1 : list->weights[entry]);
    }
  }
}

}  // namespace

Sequence::Description Sequence::Describe(Detail detail) const {
  MutexLock lock(mutex_);
  Description description = {.id = id_, .owner = owner()};
  if (freed_) return description;
  description.failed = !failure_.empty();
  description.failure = failure_;
  const std::uint64_t in_segments = TokensInSegments();
  std::uint64_t committed = in_segments;
  if (const std::shared_ptr<const TailHandle> tail = this->tail()) {
    description.decoding = true;
    // For display only: an impossible count is reported as nothing committed.
    const std::uint64_t claimed = tail->CommittedTokens().value_or(in_segments);
    if (claimed >= in_segments && claimed - in_segments <= model_->layout().ring_capacity()) {
      committed = claimed;
    }
  }
  description.tokens = committed;
  description.offloaded = offloaded_;
  for (std::size_t i = 0; offloaded_ && i < lanes_.size(); ++i) {
    for (const SegmentRun& run : RunsOf(lanes_[i])) description.stored_bytes += run.stored_bytes;
  }
  for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
    for (std::uint32_t head = 0; head < model_->layout().kv_heads(layer); ++head) {
      const Lane& lane = LaneAt(model_->layout().lane(layer, head));
      description.tile_bytes += lane.tile_bytes();
      for (const HeldSegment& held : lane.segments) {
        if (held.segment.use_count() > 1)
          description.shared_tile_bytes += held.segment->tile_bytes();
      }
      if (detail == Detail::kSums) continue;
      description.lanes.push_back(
          {layer, head, lane.entries, committed > lane.tail_start ? committed - lane.tail_start : 0,
           static_cast<std::uint32_t>(lane.segments.size()), lane.tile_bytes(), RunsOf(lane),
           lane.tail_start, lane.moved.shift});
      if (detail == Detail::kEntries) ListEntries(lane, description.lanes.back());
    }
  }
  return description;
}

}  // namespace tessera::cache
