#include "client/mapped/tails.h"

#include <utility>

#include "daemon/base/strings.h"

namespace tessera::client {

absl::StatusOr<std::shared_ptr<TailExtent>> Tails::Extent(const Place& place) {
  if (const auto it = extents_.find(place.extent); it != extents_.end()) return it->second;
  absl::StatusOr<Descriptor> descriptor = source_.Fetch(shm::DescriptorKind::kTail, place.extent);
  if (!descriptor.ok()) return descriptor.status();
  if (descriptor->bytes != place.extent_bytes) {
    return absl::InternalError(Concat("tail extent ", place.extent, " has ", descriptor->bytes,
                                      " bytes; the daemon announced ", place.extent_bytes));
  }
  absl::StatusOr<Mapping> mapping = Mapping::Map(*descriptor, gpu_);
  if (!mapping.ok()) return mapping.status();
  auto extent = std::make_shared<TailExtent>(TailExtent{*std::move(mapping)});
  extents_[place.extent] = extent;
  return extent;
}

absl::StatusOr<Tail> Tails::Open(const Place& place, std::uint64_t session) {
  std::shared_ptr<TailExtent> extent;
  {
    MutexLock lock(mutex_);
    absl::StatusOr<std::shared_ptr<TailExtent>> mapped = Extent(place);
    if (!mapped.ok()) return mapped.status();
    extent = *std::move(mapped);
  }
  const std::uint64_t bytes = extent->mapping.bytes();
  if (place.offset % shm::kObjectAlignment != 0 || place.offset > bytes ||
      place.region_bytes > bytes - place.offset || place.commit_slot >= shm::kCommitSlots) {
    return absl::InternalError(
        Concat("the tail of ", place.sequence.ToString(), " at offset ", place.offset, " with ",
               place.region_bytes, " bytes and commit slot ", place.commit_slot,
               " does not fit an extent of ", bytes, " bytes and ", shm::kCommitSlots, " slots"));
  }
  Tail tail = {.session = session,
               .generation = place.generation,
               .commit_slot = place.commit_slot,
               .first_token = place.tokens,
               .region = extent->mapping.data() + place.offset,
               .extent = std::move(extent)};
  MutexLock lock(commit_mutex_);
  owners_[place.commit_slot] = {place.sequence, place.generation};
  // Nothing is committed yet. This overwrites what a late step of the slot's last owner may have
  // stored.
  control_.commits[place.commit_slot].store(shm::CommitWord::Pack(place.generation, place.tokens),
                                            std::memory_order_release);
  return tail;
}

void Tails::Mark(std::span<const Commit> commits, bool in_step) {
  MutexLock lock(commit_mutex_);
  for (const Commit& commit : commits) {
    const Owner wanted = {commit.sequence, commit.tail->generation};
    if (owners_[commit.tail->commit_slot] != wanted) continue;
    // Before this step reads the block: the daemon reads the word after it has taken the tail away.
    control_.commits[commit.tail->commit_slot].store(
        shm::CommitWord::Pack(commit.tail->generation, commit.tokens) |
            (in_step ? shm::CommitWord::kInStep : 0),
        std::memory_order_seq_cst);
  }
}

bool Tails::Store(std::span<const Commit> commits) {
  MutexLock lock(commit_mutex_);
  for (const Commit& commit : commits) {
    const Owner wanted = {commit.sequence, commit.tail->generation};
    if (owners_[commit.tail->commit_slot] != wanted) return false;
  }
  for (const Commit& commit : commits) {
    // Before the block is read again, as in Mark.
    control_.commits[commit.tail->commit_slot].store(
        shm::CommitWord::Pack(commit.tail->generation, commit.tokens), std::memory_order_seq_cst);
  }
  return true;
}

void Tails::Release(std::uint32_t extent) {
  MutexLock lock(mutex_);
  const auto it = extents_.find(extent);
  if (it == extents_.end()) return;
  std::erase_if(released_, [](const std::weak_ptr<TailExtent>& old) { return old.expired(); });
  released_.push_back(it->second);
  extents_.erase(it);
}

void Tails::Unmap() {
  MutexLock lock(mutex_);
  for (auto& [index, extent] : extents_) extent->mapping = Mapping();
  for (const std::weak_ptr<TailExtent>& old : released_) {
    if (const std::shared_ptr<TailExtent> extent = old.lock()) extent->mapping = Mapping();
  }
  extents_.clear();
  released_.clear();
}

std::uint32_t Tails::extents() const {
  MutexLock lock(mutex_);
  return static_cast<std::uint32_t>(extents_.size());
}

}  // namespace tessera::client
