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
  // The first extent is created before the header exists; Create fills in its entry.
  if (directory->header_ == nullptr || generation == 0) return;
  directory->header_->directory_extents.store(index + 1);
  directory->header_->mapping_version.fetch_add(1);
}

void Directory::PoolObserver::ExtentChanged(std::uint32_t index, std::uint32_t generation) {
  directory->header_->pool_extent_generation[index].store(generation);
  directory->header_->mapping_version.fetch_add(1);
  if (generation != 0) return;
  directory->extents_gone_.fetch_add(1);
  if (directory->on_extent_gone_) directory->on_extent_gone_();
}

absl::StatusOr<std::unique_ptr<Directory>> Directory::Create(const Options& options) {
  std::unique_ptr<Directory> directory(new Directory());
  directory->on_extent_gone_ = options.on_extent_gone;
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
      .reserve_first_slab = true,
      .shrink = false,
  });
  if (!pool.ok()) return pool.status();
  directory->pool_ = *std::move(pool);
  // Extent memory is zeroed: every word not set here starts at 0.
  auto* header = new (directory->pool_->base()) shm::DirectoryHeader;
  header->magic = shm::kDirectoryMagic;
  header->protocol_version = shm::kProtocolVersion;
  header->header_bytes = sizeof(shm::DirectoryHeader);
  header->layout_fingerprint = shm::kLayoutFingerprint;
  header->instance = options.instance;
  header->directory_extent_bytes = options.extent_bytes;
  header->directory_limit_bytes = options.limit_bytes;
  header->directory_extents.store(1);
  header->epoch.store(1);
  header->mapping_version.store(1);
  directory->header_ = header;
  return directory;
}

void Directory::DescribePool(std::uint64_t extent_bytes, std::uint64_t limit_bytes) {
  header_->pool_extent_bytes = extent_bytes;
  header_->pool_limit_bytes = limit_bytes;
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
