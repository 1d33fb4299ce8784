#include "daemon/cache/tail/tail.h"

#include <algorithm>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::cache {

TailRegion& TailRegion::operator=(TailRegion&& other) noexcept {
  if (this != &other) {
    Reset();
    memory_ = std::exchange(other.memory_, nullptr);
    data_ = other.data_;
    extent_ = other.extent_;
    extent_bytes_ = other.extent_bytes_;
    offset_ = other.offset_;
  }
  return *this;
}

void TailRegion::Reset() {
  if (memory_ == nullptr) return;
  memory_->Return(*this);
  memory_ = nullptr;
}

absl::StatusOr<TailMemory::Extent> TailMemory::NewExtent(std::uint64_t region_bytes) const {
  const std::uint64_t bytes = device::RoundUp(std::max(region_bytes, options_.extent_bytes),
                                              options_.device->description().granularity);
  Extent extent;
  absl::StatusOr<pool::Charge> tenant = options_.tenant->Reserve(pool::MemoryTag::kTails, bytes);
  if (!tenant.ok()) return tenant.status();
  absl::StatusOr<pool::Charge> node = options_.node->Reserve(pool::MemoryTag::kTails, bytes);
  if (!node.ok()) return node.status();
  absl::StatusOr<std::unique_ptr<device::Memory>> memory =
      options_.device->CreateWorkerMemory("tessera-tails", bytes);
  if (!memory.ok()) return memory.status();
  extent.memory = *std::move(memory);
  extent.node_charge = *std::move(node);
  extent.tenant_charge = *std::move(tenant);
  extent.Cut(region_bytes);
  return extent;
}

void TailMemory::Extent::Cut(std::uint64_t bytes) {
  region_bytes = bytes;
  regions = static_cast<std::uint32_t>(memory->bytes() / bytes);
  free.clear();
  for (std::uint32_t i = regions; i-- > 0;) free.push_back(i);
}

absl::StatusOr<TailRegion> TailMemory::Allocate(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  auto it = std::find_if(extents_.begin(), extents_.end(), [&](const Extent& extent) {
    return extent.present() && extent.region_bytes == bytes && !extent.free.empty();
  });
  if (it == extents_.end()) {
    // Reuse an idle extent that is large enough; it held rings of another model.
    it = std::find_if(extents_.begin(), extents_.end(), [&](const Extent& extent) {
      return extent.idle() && extent.memory->bytes() >= bytes;
    });
    if (it != extents_.end()) it->Cut(bytes);
  }
  if (it == extents_.end()) {
    absl::StatusOr<Extent> extent = NewExtent(bytes);
    if (!extent.ok()) return extent.status();
    it = std::find_if(extents_.begin(), extents_.end(),
                      [](const Extent& e) { return !e.present(); });
    if (it == extents_.end()) it = extents_.emplace(extents_.end());
    *it = *std::move(extent);
  }
  TailRegion region;
  region.memory_ = shared_from_this();
  region.extent_ = static_cast<std::uint32_t>(it - extents_.begin());
  region.extent_bytes_ = it->memory->bytes();
  region.offset_ = it->free.back() * bytes;
  region.data_ = it->memory->data() + region.offset_;
  it->free.pop_back();
  return region;
}

void TailMemory::Return(const TailRegion& region) {
  MutexLock lock(mutex_);
  Extent& extent = extents_[region.extent_];
  extent.free.push_back(static_cast<std::uint32_t>(region.offset_ / extent.region_bytes));
}

absl::StatusOr<device::Export> TailMemory::Share(std::uint32_t index) const {
  MutexLock lock(mutex_);
  if (index >= extents_.size() || !extents_[index].present()) {
    return absl::NotFoundError(Concat("no tail extent ", index));
  }
  return extents_[index].memory->Share();
}

std::vector<std::uint32_t> TailMemory::ReleaseIdle() {
  std::vector<std::uint32_t> released;
  if (options_.device->description().waits_for_importers) return released;
  MutexLock lock(mutex_);
  bool kept = false;
  for (std::uint32_t i = 0; i < extents_.size(); ++i) {
    if (!extents_[i].idle()) continue;
    if (std::exchange(kept, true)) {
      extents_[i] = Extent();
      released.push_back(i);
    }
  }
  return released;
}

std::uint32_t TailMemory::extents() const {
  MutexLock lock(mutex_);
  return static_cast<std::uint32_t>(
      std::count_if(extents_.begin(), extents_.end(), [](const Extent& e) { return e.present(); }));
}

}  // namespace tessera::cache
