// `HostTier` stores bytes that are currently not in a pool, in host memory. It is the first tier
// below the pool. It stores and returns bytes as they are and never interprets them.
//
//   used_bytes() == sum of bytes() of all live blobs, and never exceeds the limit
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/metrics/instruments.h"
#include "daemon/platform/heap.h"

namespace tessera::tiers {

class HostTier;

// Counts since start, for the metrics: of transfers of whole sequences.
struct Transfers {
  metrics::DurationHistogram durations{metrics::kMoveBounds};  // of those that succeeded
  std::atomic<std::uint64_t> errors{0};  // the tier was full, or copying failed
};

// Memory in the tier, freed by the destructor. The caller that reserved it fills it before sharing
// it; after that, it never changes.
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
  Blob(HostTier* tier, ClearedBytes data, std::uint64_t bytes)
      : tier_(tier), data_(std::move(data)), bytes_(bytes) {}

  HostTier* tier_ = nullptr;
  ClearedBytes data_;
  std::uint64_t bytes_ = 0;
};

// Thread-safe. Outlives its blobs.
class HostTier {
 public:
  // `limit_bytes` 0 disables the tier; it then refuses everything.
  explicit HostTier(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  HostTier(const HostTier&) = delete;
  HostTier& operator=(const HostTier&) = delete;
  ~HostTier();

  // Reserves uninitialized memory. RESOURCE_EXHAUSTED with requested, used and limit bytes.
  absl::StatusOr<Blob> Reserve(std::uint64_t bytes);

  bool enabled() const { return limit_bytes_ != 0; }
  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t used_bytes() const { return used_.load(std::memory_order_relaxed); }
  std::uint64_t free_bytes() const { return limit_bytes_ - used_bytes(); }
  // Counted by whoever copies between pool and tier.
  Transfers& transfers() { return transfers_; }
  const Transfers& transfers() const { return transfers_; }

 private:
  friend class Blob;
  void Return(std::uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

  const std::uint64_t limit_bytes_;
  std::atomic<std::uint64_t> used_{0};
  Transfers transfers_;
};

}  // namespace tessera::tiers
