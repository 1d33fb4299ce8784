// Memory in sealed memfd extents, like a daemon's pool or directory. Freed memory is overwritten at
// once, and a new extent may reuse the place of a dropped one.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/layout.h"

namespace tessera::fakes {

class ExtentArena {
 public:
  using Changed = std::function<void(std::uint32_t index, std::uint32_t generation)>;

  ExtentArena(std::uint64_t extent_bytes, std::uint32_t limit, Changed changed)
      : extent_bytes_(extent_bytes), extents_(limit), changed_(std::move(changed)) {
    absl::StatusOr<AddressRange> range = AddressRange::Reserve(limit_bytes());
    TESSERA_CHECK(range.ok(), range.status().ToString());
    range_ = *std::move(range);
  }

  std::uint64_t extent_bytes() const { return extent_bytes_; }
  std::uint64_t limit_bytes() const { return extent_bytes_ * extents_.size(); }
  std::byte* at(std::uint64_t offset) { return range_.data() + offset; }
  std::uint32_t generation(std::uint32_t index) const { return extents_[index].generation; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(extents_.size()); }
  const Memfd& memory(std::uint32_t index) const { return extents_[index].memory; }

  // First fit. Creates an extent in the first free place if none has room.
  std::uint64_t Allocate(std::uint64_t bytes) {
    bytes = (bytes + shm::kObjectAlignment - 1) / shm::kObjectAlignment * shm::kObjectAlignment;
    TESSERA_CHECK(bytes <= extent_bytes_, "larger than an extent");
    for (std::uint32_t i = 0; i < extents_.size(); ++i) {
      if (extents_[i].generation == 0) continue;
      const std::uint64_t offset = Fit(extents_[i], bytes);
      if (offset + bytes <= extent_bytes_) return Take(i, offset, bytes);
    }
    for (std::uint32_t i = 0; i < extents_.size(); ++i) {
      if (extents_[i].generation != 0) continue;
      Add(i);
      return Take(i, 0, bytes);
    }
    TESSERA_CHECK(false, "the arena is full");
    return 0;
  }

  void Free(std::uint64_t offset) {
    auto& used = extents_[offset / extent_bytes_].used;
    const auto it = used.find(offset % extent_bytes_);
    TESSERA_CHECK(it != used.end(), "freed twice");
    std::memset(at(offset), 0xff, it->second);  // as a row: NaN; as an offset: out of bounds
    used.erase(it);
  }

  // Drops empty extents. Returns their number.
  std::uint32_t DropEmpty() {
    std::uint32_t dropped = 0;
    for (std::uint32_t i = 0; i < extents_.size(); ++i) {
      if (extents_[i].generation == 0 || !extents_[i].used.empty()) continue;
      extents_[i] = Extent();
      TESSERA_CHECK(range_.Reset(i * extent_bytes_, extent_bytes_).ok(), "unmapping an extent");
      changed_(i, 0);
      ++dropped;
    }
    return dropped;
  }

  std::uint32_t present() const {
    std::uint32_t count = 0;
    for (const Extent& extent : extents_) count += extent.generation != 0;
    return count;
  }

 private:
  struct Extent {
    Memfd memory;
    std::uint32_t generation = 0;
    std::map<std::uint64_t, std::uint64_t> used;  // size in bytes, by offset in the extent
  };

  static std::uint64_t Fit(const Extent& extent, std::uint64_t bytes) {
    std::uint64_t next = 0;
    for (const auto& [offset, length] : extent.used) {
      if (next + bytes <= offset) break;
      next = offset + length;
    }
    return next;
  }
  std::uint64_t Take(std::uint32_t index, std::uint64_t offset, std::uint64_t bytes) {
    extents_[index].used[offset] = bytes;
    return index * extent_bytes_ + offset;
  }
  void Add(std::uint32_t index) {
    absl::StatusOr<Memfd> memory = Memfd::Create("tessera-fake", extent_bytes_);
    TESSERA_CHECK(memory.ok(), memory.status().ToString());
    absl::Status mapped =
        range_.MapAt(index * extent_bytes_, memory->fd(), extent_bytes_, Access::kReadWrite);
    TESSERA_CHECK(mapped.ok(), mapped.ToString());
    absl::Status sealed = memory->Seal(SealFor::kDaemonWrites);
    TESSERA_CHECK(sealed.ok(), sealed.ToString());
    extents_[index].memory = *std::move(memory);
    extents_[index].generation = ++last_generation_;
    changed_(index, last_generation_);
  }

  const std::uint64_t extent_bytes_;
  AddressRange range_;
  std::vector<Extent> extents_;
  const Changed changed_;
  std::uint32_t last_generation_ = 0;
};

}  // namespace tessera::fakes
