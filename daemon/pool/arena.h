// `Arena` is a growable set of extents in one address range, so that an offset means the same place
// to the daemon and to workers. Extents are added and removed whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/device/memory.h"
#include "daemon/pool/account.h"

namespace tessera::pool {

// Not thread-safe: the owning Pool locks.
class Arena {
 public:
  struct Options {
    std::uint64_t extent_bytes;
    std::uint64_t limit_bytes;  // address space, in whole extents
    Account* node;              // charged for physical memory
    MemoryTag tag;
    device::MemorySource* source;
  };
  static absl::StatusOr<Arena> Create(const Options& options);

  // Adds an extent at the lowest free index and returns the index.
  absl::StatusOr<std::uint32_t> Grow();
  // The same with an extent's charge that the caller has reserved. It is taken on success.
  absl::StatusOr<std::uint32_t> Grow(Charge& reserved);
  // Releases an extent, which must not hold any object.
  void Shrink(std::uint32_t index);

  // The base of all offsets; see device::Space.
  std::byte* base() const { return space_->base(); }
  // The address of an offset in an existing extent.
  std::byte* At(std::uint64_t offset) const {
    return slots_[offset / options_.extent_bytes].memory->data() + offset % options_.extent_bytes;
  }
  std::uint64_t extent_bytes() const { return options_.extent_bytes; }
  std::uint64_t limit_bytes() const { return options_.limit_bytes; }
  std::uint32_t extents() const { return live_; }
  // Number of indices used so far; some may be empty.
  std::uint32_t places() const { return static_cast<std::uint32_t>(slots_.size()); }
  // 0 if there is no extent at this index.
  std::uint32_t generation(std::uint32_t index) const {
    return index < slots_.size() && slots_[index].memory ? slots_[index].generation : 0;
  }
  // Null if there is no extent at this index.
  const device::Memory* memory(std::uint32_t index) const {
    return index < slots_.size() ? slots_[index].memory.get() : nullptr;
  }

 private:
  struct Slot {
    std::unique_ptr<device::Memory> memory;
    Charge charge;
    std::uint32_t generation = 0;
  };
  // The lowest free index, if there is address space for it.
  absl::StatusOr<std::uint32_t> FreeIndex() const;
  Arena(const Options& options, std::unique_ptr<device::Space> space)
      : options_(options), space_(std::move(space)) {}

  Options options_;
  std::unique_ptr<device::Space> space_;  // outlives the memory in its slots
  std::vector<Slot> slots_;
  std::uint32_t live_ = 0;
};

}  // namespace tessera::pool
