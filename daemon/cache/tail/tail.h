// Tail memory of one session: the rings of its decoding sequences, in memory that the worker
// writes.
//
// All of it is hostile input: the daemon copies rows before it examines them and trusts no count
// stored there.
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

// The rings of one sequence. The destructor releases their memory.
class TailRegion {
 public:
  TailRegion() = default;
  TailRegion(TailRegion&& other) noexcept { *this = std::move(other); }
  TailRegion& operator=(TailRegion&& other) noexcept;
  ~TailRegion() { Reset(); }

  bool valid() const { return memory_ != nullptr; }
  std::byte* data() const { return data_; }  // device address; the daemon never writes to it
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

// Thread-safe. Each region holds a reference that keeps it alive.
class TailMemory : public std::enable_shared_from_this<TailMemory> {
 public:
  struct Options {
    device::Device* device;
    std::uint64_t extent_bytes;  // minimum size; a larger region gets an extent of its size
    pool::Account* node;
    pool::Account* tenant;
  };
  static std::shared_ptr<TailMemory> Create(const Options& options) {
    return std::shared_ptr<TailMemory>(new TailMemory(options));
  }

  absl::StatusOr<TailRegion> Allocate(std::uint64_t bytes);
  // Returns what the worker needs to map the extent.
  absl::StatusOr<device::Export> Share(std::uint32_t extent) const;
  // Releases extents that hold no region, except one, and returns their indices so that the worker
  // can unmap them. Returns nothing if the device must first wait for the worker; the extents are
  // then kept for the session's next tails.
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
