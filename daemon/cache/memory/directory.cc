#include "daemon/cache/memory/directory.h"

#include <cstring>
#include <new>
#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

using pool::Block;
using pool::Fit;
using pool::MemoryTag;

void Directory::OwnObserver::ExtentChanged(std::uint32_t index, std::uint32_t generation) {
  // The first extent is created before the header; Open fills in its entry.
  if (index == 0 || generation == 0) return;
  directory->header_->directory_extents.store(index + 1);
  directory->header_->mapping_version.fetch_add(1);
}

void Directory::PoolObserver::ExtentChanged(std::uint32_t index, std::uint32_t generation) {
  directory->header_->pool_extent_generation[index].store(generation);
  directory->header_->mapping_version.fetch_add(1);
  if (generation != 0) return;
  directory->extents_gone_.fetch_add(1);
  if (directory->options_.on_extent_gone) directory->options_.on_extent_gone();
}

absl::StatusOr<std::unique_ptr<Directory>> Directory::Create(const Options& options) {
  std::unique_ptr<Directory> directory(new Directory(options));
  directory->own_observer_.directory = directory.get();
  directory->pool_observer_.directory = directory.get();
  absl::StatusOr<std::unique_ptr<pool::Pool>> pool = pool::Pool::Create({
      .arena = {.extent_bytes = options.extent_bytes,
                .limit_bytes = options.limit_bytes,
                .node = options.node,
                .tag = MemoryTag::kDirectoryExtents,
                .source = options.source},
      .slab_bytes = kDirectorySlabBytes,
      .tenant = options.tenant,
      .observer = &directory->own_observer_,
      .shrink = false,
  });
  if (!pool.ok()) return pool.status();
  directory->pool_ = *std::move(pool);
  directory->header_ = reinterpret_cast<shm::DirectoryHeader*>(directory->pool_->base());
  absl::StatusOr<pool::Charge> reserved =
      options.node->Reserve(MemoryTag::kDirectoryExtents, options.extent_bytes);
  if (!reserved.ok()) return reserved.status();
  MutexLock lock(directory->mutex_);
  directory->reserved_ = *std::move(reserved);
  return directory;
}

absl::Status Directory::Open() {
  MutexLock lock(mutex_);
  if (open_) return absl::OkStatus();
  absl::Status status = pool_->AddFirstExtent(reserved_);
  if (!status.ok()) return status;
  // Extent memory is zeroed: every word not set here starts at 0.
  auto* header = new (pool_->base()) shm::DirectoryHeader;
  header->magic = shm::kDirectoryMagic;
  header->protocol_version = shm::kProtocolVersion;
  header->header_bytes = sizeof(shm::DirectoryHeader);
  header->layout_fingerprint = shm::kLayoutFingerprint;
  header->instance = options_.instance;
  header->directory_extent_bytes = options_.extent_bytes;
  header->directory_limit_bytes = options_.limit_bytes;
  header->pool_extent_bytes = options_.pool_extent_bytes;
  header->pool_limit_bytes = options_.pool_limit_bytes;
  header->directory_extents.store(1);
  header->epoch.store(1);
  header->mapping_version.store(1);
  open_ = true;
  return absl::OkStatus();
}

absl::StatusOr<Block> Directory::AllocateSequenceBlock(std::uint32_t lanes) {
  const std::uint64_t bytes = sizeof(shm::SequenceBlock) + std::uint64_t{8} * lanes;
  absl::StatusOr<Block> block = pool_->Allocate(bytes, Fit::kRounded, MemoryTag::kSequences);
  if (block.ok()) std::memset(block->data(), 0, bytes);
  return block;
}

absl::StatusOr<Block> Directory::AllocateSnapshot(std::uint32_t segments) {
  if (segments > shm::kMaxSegments) {
    return WithCause(absl::ResourceExhaustedError(
                         Concat(segments, " segments in one lane; the limit is ", shm::kMaxSegments,
                                "; compress the sequence to join short segments, then retry")),
                     ErrorCause::kQuota);
  }
  return pool_->Allocate(sizeof(shm::Snapshot) + segments * sizeof(shm::SegmentRef), Fit::kRounded,
                         MemoryTag::kSnapshots);
}

}  // namespace tessera::cache
