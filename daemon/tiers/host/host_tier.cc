#include "daemon/tiers/host/host_tier.h"

#include <utility>

#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::tiers {

Blob& Blob::operator=(Blob&& other) noexcept {
  if (this != &other) {
    Reset();
    tier_ = std::exchange(other.tier_, nullptr);
    data_ = std::move(other.data_);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void Blob::Reset() {
  if (tier_ == nullptr) return;
  // Free the memory first: what the tier counts as free must be free.
  data_.reset();
  std::exchange(tier_, nullptr)->Return(std::exchange(bytes_, 0));
}

HostTier::~HostTier() { TESSERA_CHECK(used_bytes() == 0, "all blobs are freed before their tier"); }

absl::StatusOr<Blob> HostTier::Reserve(std::uint64_t bytes) {
  if (!enabled()) {
    return WithCause(
        absl::ResourceExhaustedError(
            "the host tier is disabled: host_tier_bytes is 0; set it to enable offloading"),
        ErrorCause::kHostMemory);
  }
  std::uint64_t before = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > limit_bytes_ || before > limit_bytes_ - bytes) {
      return WithCause(absl::ResourceExhaustedError(Concat(
                           "host tier: ", FormatBytes(bytes), " requested, ", FormatBytes(before),
                           " used of a limit of ", FormatBytes(limit_bytes_),
                           "; free sequences and retry, or raise host_tier_bytes")),
                       ErrorCause::kHostMemory);
    }
  } while (!used_.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
  ClearedBytes data = NewClearedBytes(bytes);
  if (data == nullptr) {
    Return(bytes);
    return WithCause(
        absl::ResourceExhaustedError(Concat("host tier: the machine cannot provide ",
                                            FormatBytes(bytes), "; the tier already uses ",
                                            FormatBytes(before), "; free sequences and retry")),
        ErrorCause::kHostMemory);
  }
  return Blob(this, std::move(data), bytes);
}

}  // namespace tessera::tiers
