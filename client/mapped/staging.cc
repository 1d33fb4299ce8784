#include "client/mapped/staging.h"

#include <utility>

#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

constexpr std::uint64_t kAlignment = 64;

}  // namespace

StagingRing::Place& StagingRing::Place::operator=(Place&& other) noexcept {
  if (this != &other) {
    Reset();
    ring_ = std::exchange(other.ring_, nullptr);
    id_ = other.id_;
    offset_ = other.offset_;
    bytes_ = other.bytes_;
  }
  return *this;
}

void StagingRing::Place::Reset() {
  if (StagingRing* ring = std::exchange(ring_, nullptr)) ring->Return(id_);
}

// The range [oldest.begin, newest.end) is in use; it may wrap around the end of the arena.
std::optional<std::uint64_t> StagingRing::Fit(std::uint64_t bytes) const {
  if (spans_.empty()) return 0;
  const std::uint64_t oldest = spans_.front().begin;
  const std::uint64_t next = spans_.back().end;
  const bool wrapped = spans_.back().begin < oldest;
  if (wrapped) return bytes <= oldest - next ? std::optional(next) : std::nullopt;
  if (bytes <= bytes_ - next) return next;
  return bytes <= oldest ? std::optional(std::uint64_t{0}) : std::nullopt;
}

absl::StatusOr<StagingRing::Place> StagingRing::Take(std::uint64_t bytes) {
  const std::uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  if (bytes == 0 || rounded > bytes_ || rounded < bytes) {
    return absl::InvalidArgumentError(
        Concat("a place of ", bytes, " bytes does not fit into the staging arena of ", bytes_));
  }
  MutexLock lock(mutex_);
  for (;;) {
    if (closed_) return absl::UnavailableError("the staging arena is closed");
    if (const std::optional<std::uint64_t> offset = Fit(rounded)) {
      Place place;
      place.ring_ = this;
      place.id_ = first_id_ + spans_.size();
      place.offset_ = *offset;
      place.bytes_ = bytes;
      spans_.push_back({*offset, *offset + rounded, true});
      return place;
    }
    room_.Wait(mutex_);
  }
}

void StagingRing::Return(std::uint64_t id) {
  MutexLock lock(mutex_);
  spans_[id - first_id_].in_use = false;
  while (!spans_.empty() && !spans_.front().in_use) {
    spans_.pop_front();
    ++first_id_;
  }
  room_.NotifyAll();
}

void StagingRing::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
  room_.NotifyAll();
}

std::uint64_t StagingRing::taken() const {
  MutexLock lock(mutex_);
  return spans_.size();
}

}  // namespace tessera::client
