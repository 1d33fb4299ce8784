// Host memory for what is not in a pool now: the first tier below it. Bytes come in and go out
// whole and are never looked at in between.
//
//   used_bytes() == the sum of bytes() of all blobs that live; never above the limit
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"

namespace tessera::tiers {

class HostTier;

// Bytes in the tier, given back by the destructor. Filled by whoever reserved it, then constant.
class Blob {
 public:
  Blob() = default;
  Blob(Blob&& other) noexcept { *this = std::move(other); }
  Blob& operator=(Blob&& other) noexcept;
  Blob(const Blob&) = delete;
  Blob& operator=(const Blob&) = delete;
  ~Blob() { Reset(); }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::uint64_t bytes() const { return bytes_; }
  void Reset();

 private:
  friend class HostTier;
  Blob(HostTier* tier, std::unique_ptr<std::byte[]> data, std::uint64_t bytes)
      : tier_(tier), data_(std::move(data)), bytes_(bytes) {}

  HostTier* tier_ = nullptr;
  std::unique_ptr<std::byte[]> data_;
  std::uint64_t bytes_ = 0;
};

// Thread-safe. Outlives its blobs.
class HostTier {
 public:
  // `limit_bytes` 0: the tier is turned off, and refuses everything.
  explicit HostTier(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;
  ~HostTier();

  // Room for that many bytes, which hold anything. RESOURCE_EXHAUSTED with asked, used and limit.
  absl::StatusOr<Blob> Reserve(std::uint64_t bytes);

  bool enabled() const { return limit_bytes_ != 0; }
  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t used_bytes() const { return used_.load(std::memory_order_relaxed); }
  std::uint64_t free_bytes() const { return limit_bytes_ - used_bytes(); }

 private:
  friend class Blob;
  void Return(std::uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  const std::uint64_t limit_bytes_;
  std::atomic<std::uint64_t> used_{0};
};

}  // namespace tessera::tiers
