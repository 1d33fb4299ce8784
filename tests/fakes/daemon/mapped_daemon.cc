#include "tests/fakes/daemon/mapped_daemon.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "daemon/base/strings.h"
#include "proto/shm/pin.h"
#include "proto/shm/segment_ref.h"
#include "tests/fakes/daemon/mapped_daemon_transport.h"

namespace tessera::fakes {

using kernels::kTileEntries;

MappedDaemon::MappedDaemon(const Options& options) : options_(options), random_(options.seed) {
  std::lock_guard lock(mutex_);
  MakeMemory();
}

MappedDaemon::~MappedDaemon() { EndLeases(absl::UnavailableError("the test is over"), false); }

void MappedDaemon::MakeMemory() {
  header_ready_ = false;
  directory_ = std::make_unique<ExtentArena>(options_.directory_extent_bytes, 64,
                                             [this](std::uint32_t index, std::uint32_t generation) {
                                               if (!header_ready_ || generation == 0) return;
                                               header().directory_extents.store(index + 1);
                                               header().mapping_version.fetch_add(1);
                                             });
  pool_ = std::make_unique<ExtentArena>(options_.pool_extent_bytes, 256,
                                        [this](std::uint32_t index, std::uint32_t generation) {
                                          header().pool_extent_generation[index].store(generation);
                                          header().mapping_version.fetch_add(1);
                                        });
  TESSERA_CHECK(directory_->Allocate(sizeof(shm::DirectoryHeader)) == 0, "the first block");
  auto* made = new (directory_->at(0)) shm::DirectoryHeader;
  made->magic = shm::kDirectoryMagic;
  made->protocol_version = shm::kProtocolVersion;
  made->header_bytes = sizeof(shm::DirectoryHeader);
  made->layout_fingerprint = shm::kLayoutFingerprint;
  made->instance = instance_;
  made->directory_extent_bytes = options_.directory_extent_bytes;
  made->pool_extent_bytes = options_.pool_extent_bytes;
  made->directory_limit_bytes = directory_->limit_bytes();
  made->pool_limit_bytes = pool_->limit_bytes();
  made->directory_extents.store(1);
  made->epoch.store(1);
  made->mapping_version.store(1);
  header_ready_ = true;
}

shm::DirectoryHeader& MappedDaemon::header() {
  return *reinterpret_cast<shm::DirectoryHeader*>(directory_->at(0));
}

shm::SequenceBlock& MappedDaemon::block(const Sequence& sequence) {
  return *reinterpret_cast<shm::SequenceBlock*>(directory_->at(sequence.block));
}

// ---- Epochs

void MappedDaemon::Retire(Retired old) {
  old.epoch = header().epoch.fetch_add(1);
  retired_.push_back(std::move(old));
  CollectLocked();
}

void MappedDaemon::CollectLocked() {
  std::uint64_t oldest = ~std::uint64_t{0};
  for (const std::shared_ptr<Session>& session : sessions_) {
    for (const shm::ReaderSlot& slot : session->control->readers) {
      const std::uint64_t word = slot.word.load();
      if (word == shm::kPinFree || word == shm::kPinRevoked) continue;
      oldest = std::min(oldest, shm::PinnedEpoch(word));
    }
  }
  while (!retired_.empty() && retired_.front().epoch < oldest) {
    Retired old = std::move(retired_.front());
    retired_.pop_front();
    for (std::uint64_t offset : old.pool_blocks) pool_->Free(offset);
    for (std::uint64_t offset : old.directory_blocks) directory_->Free(offset);
    if (old.also) old.also();
  }
}

void MappedDaemon::Collect() {
  std::lock_guard lock(mutex_);
  CollectLocked();
}

std::uint32_t MappedDaemon::RevokePins() {
  std::lock_guard lock(mutex_);
  std::uint32_t revoked = 0;
  for (const std::shared_ptr<Session>& session : sessions_) {
    for (shm::ReaderSlot& slot : session->control->readers) {
      const std::uint64_t word = slot.word.load();
      if (word == shm::kPinFree || word == shm::kPinRevoked) continue;
      revoked += shm::Revoke(slot.word, word);
    }
  }
  CollectLocked();
  return revoked;
}

// ---- Publications

std::uint64_t MappedDaemon::NewBlock(Sequence& sequence) {
  const std::uint32_t lanes = sequence.model->layout.lanes();
  sequence.block = directory_->Allocate(sizeof(shm::SequenceBlock) + lanes * sizeof(shm::Word));
  std::memset(directory_->at(sequence.block), 0,
              sizeof(shm::SequenceBlock) + lanes * sizeof(shm::Word));
  shm::SequenceBlock& shown = block(sequence);
  shown.lanes = lanes;
  shown.layers = sequence.model->layout.layers();
  shown.state.store(shm::kSequenceLive);
  shown.version.store(1);
  shown.sequence_id.store(sequence.id);
  return sequence.block;
}

std::uint64_t MappedDaemon::WriteSegment(const Lane& lane, kernels::DenseTile tile,
                                         std::uint64_t first, std::uint64_t count,
                                         std::vector<std::uint64_t>& blocks) {
  const std::uint64_t tiles = (count + kTileEntries - 1) / kTileEntries;
  const std::uint64_t table =
      pool_->Allocate(std::max<std::uint64_t>(tiles, 1) * sizeof(std::uint64_t));
  blocks.push_back(table);
  const std::size_t row = tile.row_bytes();
  for (std::uint64_t t = 0; t < tiles; ++t) {
    const std::uint64_t offset = pool_->Allocate(tile.bytes());
    blocks.push_back(offset);
    std::memcpy(pool_->at(table) + t * sizeof offset, &offset, sizeof offset);
    std::byte* at = pool_->at(offset);
    std::memset(at, 0xff, tile.bytes());  // dead rows may hold anything
    for (std::uint32_t r = 0; r < kTileEntries && t * kTileEntries + r < count; ++r) {
      const std::size_t from = (first + t * kTileEntries + r) * row;
      std::memcpy(at + tile.key_offset(r), lane.keys.data() + from, row);
      std::memcpy(at + tile.value_offset(r), lane.values.data() + from, row);
    }
  }
  return table;
}

void MappedDaemon::PublishLane(Sequence& sequence, std::uint32_t layer, std::uint32_t head,
                               Retired& old) {
  const std::uint32_t index = sequence.model->layout.lane(layer, head);
  const kernels::DenseTile tile = sequence.model->layout.tile(layer);
  Lane& lane = sequence.lanes[index];
  old.pool_blocks.insert(old.pool_blocks.end(), lane.pool_blocks.begin(), lane.pool_blocks.end());
  if (lane.snapshot != 0) old.directory_blocks.push_back(lane.snapshot);
  lane.pool_blocks.clear();

  std::vector<shm::SegmentRef> refs;
  for (std::uint64_t first = 0; first < lane.tokens;) {
    const std::uint64_t left = lane.tokens - first;
    const std::uint64_t count = !options_.cut_segments || random_() % 3 == 0
                                    ? left
                                    : 1 + random_() % std::min<std::uint64_t>(left, 300);
    shm::SegmentRef& ref = refs.emplace_back();
    ref.tile_table = WriteSegment(lane, tile, first, count, lane.pool_blocks);
    ref.first_position = first;
    ref.entries = static_cast<std::uint32_t>(count);
    shm::SetShape(kernels::DenseShape(tile.head_dim, tile.type), ref);
    first += count;
  }
  const shm::Snapshot snapshot = {.magic = shm::kSnapshotMagic,
                                  .segment_count = static_cast<std::uint32_t>(refs.size()),
                                  .entries = lane.tokens,
                                  .tail_start = lane.tokens,
                                  .reserved = 0};
  lane.snapshot = directory_->Allocate(sizeof snapshot + refs.size() * sizeof(shm::SegmentRef));
  std::memcpy(directory_->at(lane.snapshot), &snapshot, sizeof snapshot);
  if (!refs.empty()) {
    std::memcpy(directory_->at(lane.snapshot) + sizeof snapshot, refs.data(),
                refs.size() * sizeof(shm::SegmentRef));
  }
  auto* words =
      reinterpret_cast<shm::Word*>(directory_->at(sequence.block) + sizeof(shm::SequenceBlock));
  words[index].store(shm::LaneWord::Pack(++lane.generation, lane.snapshot));
}

void MappedDaemon::Publish(Sequence& sequence) {
  Retired old;
  for (std::uint32_t layer = 0; layer < sequence.model->layout.layers(); ++layer) {
    for (std::uint32_t head = 0; head < sequence.model->layout.kv_heads(layer); ++head) {
      PublishLane(sequence, layer, head, old);
    }
  }
  block(sequence).version.fetch_add(1);
  if (sequence.tail.has_value()) {
    old.also = [this, id = sequence.id, generation = sequence.tail->generation,
                upto = TokensLocked(sequence)] {
      const auto it = sequences_.find(id);
      if (it == sequences_.end() || !it->second->tail.has_value() ||
          it->second->tail->generation != generation) {
        return;
      }
      shm::Word& start = block(*it->second).ring_start;
      if (upto > start.load()) start.store(upto);
    };
  }
  Retire(std::move(old));
}

void MappedDaemon::Republish() {
  std::lock_guard lock(mutex_);
  for (auto& [id, sequence] : sequences_) Publish(*sequence);
}

std::uint32_t MappedDaemon::DropEmptyExtents() {
  std::lock_guard lock(mutex_);
  CollectLocked();
  const std::uint32_t dropped = pool_->DropEmpty();
  v1::AttachResponse message;
  message.mutable_pool_changed();
  if (dropped > 0) {
    for (const std::shared_ptr<Session>& session : sessions_) Push(*session, message);
  }
  return dropped;
}

// ---- Tails

std::uint64_t MappedDaemon::TokensLocked(const Sequence& sequence) {
  std::uint64_t tokens = sequence.lanes.front().tokens;
  for (const Lane& lane : sequence.lanes) tokens = std::min(tokens, lane.tokens);
  return tokens;
}

std::uint64_t MappedDaemon::CommittedLocked(const Sequence& sequence) {
  const std::uint64_t held = TokensLocked(sequence);
  if (!sequence.tail.has_value()) return held;
  for (const std::shared_ptr<Session>& session : sessions_) {
    if (session->id != sequence.owner) continue;
    const std::uint64_t word =
        session->control->commits[sequence.tail->commit_slot].load(std::memory_order_acquire);
    if (!shm::CommitWord::Matches(word, sequence.tail->generation)) return held;
    const std::uint64_t committed = shm::CommitWord::Tokens(word);
    TESSERA_CHECK(committed >= held && committed - held <= sequence.model->layout.ring_capacity(),
                  Concat("a committed count of ", committed, " over ", held));
    return committed;
  }
  return held;
}

std::uint64_t MappedDaemon::AbsorbLocked(Sequence& sequence, std::uint64_t upto) {
  const std::uint64_t from = TokensLocked(sequence);
  if (upto == from) return 0;
  const auto session = std::find_if(sessions_.begin(), sessions_.end(),
                                    [&](const auto& s) { return s->id == sequence.owner; });
  std::byte* region =
      (*session)->tails[sequence.tail->extent].mapping.data() + sequence.tail->offset;
  const shm::LaneLayout& layout = sequence.model->layout;
  for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
    for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
      Lane& lane = sequence.lanes[layout.lane(layer, head)];
      const shm::TailRing ring = layout.ring(region, layer, head);
      const std::size_t row = ring.tile.row_bytes();
      for (std::uint64_t token = from; token < upto; ++token) {
        lane.keys.insert(lane.keys.end(), ring.Key(token), ring.Key(token) + row);
        lane.values.insert(lane.values.end(), ring.Value(token), ring.Value(token) + row);
      }
      lane.tokens = upto;
    }
  }
  Publish(sequence);
  return upto - from;
}

std::uint64_t MappedDaemon::Absorb() {
  std::lock_guard lock(mutex_);
  std::uint64_t tokens = 0;
  for (auto& [id, sequence] : sequences_) {
    if (!sequence->tail.has_value()) continue;
    const std::uint64_t held = TokensLocked(*sequence);
    const std::uint64_t whole = (CommittedLocked(*sequence) - held) / kTileEntries * kTileEntries;
    tokens += AbsorbLocked(*sequence, held + whole);
  }
  return tokens;
}

void MappedDaemon::CloseTail(Sequence& sequence) {
  if (!sequence.tail.has_value()) return;
  block(sequence).tail_generation.store(0);  // before reading the count
  AbsorbLocked(sequence, CommittedLocked(sequence));
  const OpenTail tail = *std::exchange(sequence.tail, std::nullopt);
  block(sequence).version.fetch_add(1);
  for (const std::shared_ptr<Session>& session : sessions_) {
    if (session->id != sequence.owner) continue;
    TailExtent& extent = session->tails[tail.extent];
    extent.taken[tail.offset / extent.region_bytes] = false;
  }
}

void MappedDaemon::CloseTailOf(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  CloseTail(*sequences_.at(id));
}

void MappedDaemon::Cut(Sequence& sequence, std::uint64_t tokens) {
  for (Lane& lane : sequence.lanes) {
    if (lane.tokens <= tokens) continue;
    const std::size_t row = lane.keys.size() / lane.tokens;
    lane.keys.resize(tokens * row);
    lane.values.resize(tokens * row);
    lane.tokens = tokens;
  }
  Publish(sequence);
}

bool MappedDaemon::InStep(const Sequence& sequence) {
  for (const std::shared_ptr<Session>& session : sessions_) {
    if (session->id != sequence.owner) continue;
    const std::uint64_t word = session->control->commits[sequence.tail->commit_slot].load();
    // Reads in the same order as the daemon.
    if (shm::CommitWord::Matches(word, sequence.tail->generation) &&
        shm::CommitWord::InStep(word) && PinsOf(*session) > 0) {
      return true;
    }
  }
  return false;
}

std::uint32_t MappedDaemon::PinsOf(const Session& session) {
  std::uint32_t count = 0;
  for (const shm::ReaderSlot& slot : session.control->readers) count += slot.word.load() > 1;
  return count;
}

bool MappedDaemon::OffloadAsDaemon(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  Sequence& sequence = *sequences_.at(id);
  if (sequence.tail.has_value()) {
    block(sequence).tail_generation.store(0);
    if (InStep(sequence)) {
      block(sequence).tail_generation.store(sequence.tail->generation);
      return false;
    }
  }
  CloseTail(sequence);
  block(sequence).state.store(shm::kSequenceOffloaded);
  auto* const words = reinterpret_cast<shm::Word*>(&block(sequence) + 1);
  for (std::size_t lane = 0; lane < sequence.lanes.size(); ++lane) words[lane].store(0);
  block(sequence).version.fetch_add(1);
  return true;
}

void MappedDaemon::TruncateAsOther(std::uint64_t id, std::uint64_t tokens) {
  std::lock_guard lock(mutex_);
  CloseTail(*sequences_.at(id));
  Cut(*sequences_.at(id), tokens);
}

// ---- Sequences

void MappedDaemon::FailSequence(std::uint64_t id, const std::string& why) {
  std::lock_guard lock(mutex_);
  Sequence& sequence = *sequences_.at(id);
  sequence.failure = why;
  block(sequence).state.store(shm::kSequenceFailed);
  CloseTail(sequence);
}

void MappedDaemon::FreeLocked(std::uint64_t id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return;
  const std::unique_ptr<Sequence> sequence = std::move(it->second);
  sequences_.erase(it);
  sequence->tail = std::nullopt;
  for (const std::shared_ptr<Session>& session : sessions_) session->commit_slots.erase(id);
  block(*sequence).state.store(shm::kSequenceGone);
  block(*sequence).sequence_id.store(0);
  block(*sequence).version.fetch_add(1);
  Retired old;
  for (Lane& lane : sequence->lanes) {
    old.pool_blocks.insert(old.pool_blocks.end(), lane.pool_blocks.begin(), lane.pool_blocks.end());
    if (lane.snapshot != 0) old.directory_blocks.push_back(lane.snapshot);
  }
  old.directory_blocks.push_back(sequence->block);
  Retire(std::move(old));
}

void MappedDaemon::Evict(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  FreeLocked(id);
}

absl::StatusOr<MappedDaemon::Sequence*> MappedDaemon::FindSequence(std::uint64_t id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::NotFoundError(Concat("no sequence ", id));
  return it->second.get();
}

// ---- Inspection

std::uint64_t MappedDaemon::ring_full_waits() {
  std::lock_guard lock(mutex_);
  return sessions_.front()->control->ring_full_waits.load();
}

std::uint32_t MappedDaemon::step_waits(std::size_t bucket) {
  std::lock_guard lock(mutex_);
  return sessions_.front()->control->step_waits[bucket].load();
}

void MappedDaemon::RequestWake() {
  std::lock_guard lock(mutex_);
  for (const std::shared_ptr<Session>& session : sessions_) session->control->wake.store(1);
}

bool MappedDaemon::WakeAsked() {
  std::lock_guard lock(mutex_);
  return sessions_.front()->control->wake.load() == 1;
}

std::uint32_t MappedDaemon::pins() {
  std::lock_guard lock(mutex_);
  std::uint32_t count = 0;
  for (const std::shared_ptr<Session>& session : sessions_) count += PinsOf(*session);
  return count;
}

std::uint32_t MappedDaemon::pool_extents() {
  std::lock_guard lock(mutex_);
  return pool_->present();
}

v1::Hello MappedDaemon::last_hello() {
  std::lock_guard lock(mutex_);
  return last_hello_;
}

std::optional<std::uint64_t> MappedDaemon::TokensOf(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return std::nullopt;
  return CommittedLocked(*it->second);
}

std::size_t MappedDaemon::sequences() {
  std::lock_guard lock(mutex_);
  return sequences_.size();
}

std::vector<std::byte> MappedDaemon::KeysOf(std::uint64_t id, std::uint32_t layer,
                                            std::uint32_t kv_head) {
  std::lock_guard lock(mutex_);
  const Sequence& sequence = *sequences_.at(id);
  return sequence.lanes[sequence.model->layout.lane(layer, kv_head)].keys;
}

void MappedDaemon::RefuseAttach(const absl::Status& why) {
  std::lock_guard lock(mutex_);
  refuse_attach_ = why;
}

void MappedDaemon::FailNextAppend(const absl::Status& why, std::uint32_t after) {
  std::lock_guard lock(mutex_);
  fail_append_ = why;
  fail_append_after_ = after;
}

void MappedDaemon::FailTruncates(const absl::Status& why, std::uint32_t times) {
  std::lock_guard lock(mutex_);
  fail_truncate_ = why;
  truncates_to_fail_ = times;
}

}  // namespace tessera::fakes
