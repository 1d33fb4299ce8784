#include "daemon/pool/pool.h"

#include <cstring>
#include <utility>

#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::pool {

void Block::Reset() {
  if (pool_ == nullptr) return;
  if (pool_->options_.clears) std::memset(data_, 0, charge_.bytes());
  pool_->Free(offset_, charge_.bytes());
  pool_ = nullptr;
  charge_.Reset();
}

absl::StatusOr<std::unique_ptr<Pool>> Pool::Create(const Options& options) {
  absl::StatusOr<Arena> arena = Arena::Create(options.arena);
  if (!arena.ok()) return arena.status();
  return std::unique_ptr<Pool>(new Pool(options, *std::move(arena)));
}

Pool::Pool(const Options& options, Arena arena)
    : options_(options),
      arena_(std::move(arena)),
      slabs_(options.arena.extent_bytes, options.slab_bytes) {}

Pool::~Pool() { TESSERA_CHECK(slabs_.objects() == 0, "all blocks are freed before their pool"); }

absl::Status Pool::AddFirstExtent(Charge& reserved) {
  MutexLock lock(mutex_);
  TESSERA_CHECK(arena_.places() == 0, "the pool is empty");
  absl::StatusOr<std::uint32_t> index = arena_.Grow(reserved);
  if (!index.ok()) return index.status();
  AddedLocked(*index);
  slabs_.ReserveFirstSlab(*index);
  return absl::OkStatus();
}

absl::Status Pool::GrowLocked() {
  absl::StatusOr<std::uint32_t> index = arena_.Grow();
  if (!index.ok()) return index.status();
  AddedLocked(*index);
  return absl::OkStatus();
}

void Pool::AddedLocked(std::uint32_t extent) {
  slabs_.AddExtent(extent);
  if (options_.observer != nullptr) {
    options_.observer->ExtentChanged(extent, arena_.generation(extent));
  }
}

// Returns true if an extent was released.
bool Pool::ShrinkLocked() {
  if (!options_.shrink || !importers_.empty()) return false;
  // Keep one idle extent, so that a load near an extent boundary does not map and unmap repeatedly.
  const std::uint64_t spare =
      std::uint64_t{arena_.extents()} * arena_.extent_bytes() - slabs_.used_bytes();
  if (spare < 2 * arena_.extent_bytes()) return false;
  const std::optional<std::uint32_t> index = slabs_.IdleExtent();
  if (!index.has_value()) return false;
  slabs_.RemoveExtent(*index);
  if (options_.observer != nullptr) options_.observer->ExtentChanged(*index, 0);
  arena_.Shrink(*index);
  return true;
}

absl::StatusOr<std::uint64_t> Pool::AllocateLocked(std::uint64_t object_bytes) {
  std::optional<std::uint64_t> offset = slabs_.Allocate(object_bytes);
  if (!offset.has_value()) {
    if (absl::Status status = GrowLocked(); !status.ok()) return status;
    offset = slabs_.Allocate(object_bytes);
    TESSERA_CHECK(offset.has_value(), "a new extent has a free slab");
  }
  return *offset;
}

absl::StatusOr<Block> Pool::Allocate(std::uint64_t bytes, Fit fit, MemoryTag tag) {
  absl::StatusOr<std::vector<Block>> blocks = AllocateMany(1, bytes, fit, tag);
  if (!blocks.ok()) return blocks.status();
  return std::move(blocks->front());
}

absl::StatusOr<std::vector<Block>> Pool::AllocateMany(std::size_t count, std::uint64_t bytes,
                                                      Fit fit, MemoryTag tag) {
  // Check the requested size first: rounding a size near 2^64 would wrap around.
  if (bytes > options_.slab_bytes || Slabs::RoundUp(bytes, fit) > options_.slab_bytes) {
    return absl::InvalidArgumentError(Concat("an object of ", FormatBytes(bytes),
                                             " does not fit a slab of ",
                                             FormatBytes(options_.slab_bytes)));
  }
  const std::uint64_t object_bytes = Slabs::RoundUp(bytes, fit);
  std::vector<Block> blocks;
  blocks.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    absl::StatusOr<Charge> charge = options_.tenant->Reserve(tag, object_bytes);
    if (!charge.ok()) return charge.status();  // blocks allocated so far free themselves
    MutexLock lock(mutex_);
    absl::StatusOr<std::uint64_t> offset = AllocateLocked(object_bytes);
    if (!offset.ok()) return offset.status();
    blocks.push_back(Block(this, *offset, arena_.At(*offset), *std::move(charge)));
  }
  return blocks;
}

void Pool::Free(std::uint64_t offset, std::uint64_t bytes) {
  MutexLock lock(mutex_);
  slabs_.Free(offset, bytes);
  ShrinkLocked();
}

absl::StatusOr<device::Export> Pool::ShareExtent(std::uint32_t index, SessionId importer,
                                                 std::uint32_t* generation) {
  MutexLock lock(mutex_);
  *generation = arena_.generation(index);
  if (*generation == 0) {
    return absl::NotFoundError(
        Concat("extent ", index, " does not exist; the pool has ", arena_.extents(), " extents"));
  }
  absl::StatusOr<device::Export> share = arena_.memory(index)->Share();
  if (share.ok() && options_.waits_for_importers) importers_.insert(importer);
  return share;
}

void Pool::ImporterGone(SessionId importer) {
  MutexLock lock(mutex_);
  if (importers_.erase(importer) == 0) return;
  while (ShrinkLocked()) {
  }
}

device::PoolView Pool::View() const {
  device::PoolView view = {.extent_bytes = arena_.extent_bytes()};
  MutexLock lock(mutex_);
  for (std::uint32_t i = 0; i < arena_.places(); ++i) {
    const device::Memory* memory = arena_.memory(i);
    view.extents.push_back(memory == nullptr ? nullptr : memory->data());
  }
  return view;
}

std::uint32_t Pool::extents() const {
  MutexLock lock(mutex_);
  return arena_.extents();
}

std::uint64_t Pool::used_bytes() const {
  MutexLock lock(mutex_);
  return slabs_.used_bytes();
}

void Pool::Validate() const {
  MutexLock lock(mutex_);
  slabs_.Validate();
}

}  // namespace tessera::pool
