// Tail memory of one session: rings for its decoding sequences, in memory that the worker writes.
//
// Everything in here is hostile input. Rows are copied out before they are looked
// at, and believes no count in it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/device/device.h"
#include "daemon/pool/account.h"

namespace tessera::cache {

class TailMemory;

// The rings of one sequence. Gives its place back on destruction.
class TailRegion {
 public:
  TailRegion() = default;
  TailRegion(TailRegion&& other) noexcept { *this = std::move(other); }
  TailRegion& operator=(TailRegion&& other) noexcept;
  ~TailRegion() { Reset(); }

  bool valid() const { return memory_ != nullptr; }
  std::byte* data() const { return data_; }  // on the device; never written by the daemon
  std::uint32_t extent() const { return extent_; }
  std::uint64_t extent_bytes() const { return extent_bytes_; }
  std::uint64_t offset() const { return offset_; }
  void Reset();

 private:
  friend class TailMemory;
  std::shared_ptr<TailMemory> memory_;
  std::byte* data_ = nullptr;
  std::uint32_t extent_ = 0;
  std::uint64_t extent_bytes_ = 0;
  std::uint64_t offset_ = 0;
};

// Thread-safe. Kept alive by its regions.
class TailMemory : public std::enable_shared_from_this<TailMemory> {
 public:
  struct Options {
    device::Device* device;
    std::uint64_t extent_bytes;  // at least; one region that needs more gets an extent of its size
    pool::Account* node;
    pool::Account* tenant;
  };
  static std::shared_ptr<TailMemory> Create(const Options& options) {
    return std::shared_ptr<TailMemory>(new TailMemory(options));
  }

  absl::StatusOr<TailRegion> Allocate(std::uint64_t bytes);
  // What the worker needs to map the extent.
  absl::StatusOr<device::Export> Share(std::uint32_t extent) const;
  // Gives back extents without a region, all but one; returns their indices, for the worker to
  // unmap them, too. None where the device must wait for the worker first: they stay for the
  // session's next tails.
  std::vector<std::uint32_t> ReleaseIdle();

  std::uint32_t extents() const;

 private:
  friend class TailRegion;
  struct Extent {
    std::unique_ptr<device::Memory> memory;
    pool::Charge node_charge;
    pool::Charge tenant_charge;
    std::uint64_t region_bytes = 0;
    std::uint32_t regions = 0;
    std::vector<std::uint32_t> free;
    void Cut(std::uint64_t bytes);
    bool present() const { return memory != nullptr; }
    bool idle() const { return present() && free.size() == regions; }
  };
  explicit TailMemory(const Options& options) : options_(options) {}
  absl::StatusOr<Extent> NewExtent(std::uint64_t region_bytes) const;
  void Return(const TailRegion& region);

  const Options options_;
  mutable Mutex mutex_;
  std::vector<Extent> extents_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::cache
