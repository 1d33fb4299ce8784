// The ring allocator of the staging arena, the shared memory through which a session passes bulk
// tensors to the daemon. Places are taken in order and returned in any order; a place is reused
// once all older ones have been returned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"

namespace tessera::client {

// Only the bookkeeping: it never touches the memory. Offsets are aligned to 64 bytes. Thread-safe.
class StagingRing {
 public:
  explicit StagingRing(std::uint64_t bytes) : bytes_(bytes) {}

  // A place in use. The destructor returns it.
  class Place {
   public:
    Place() = default;
    Place(Place&& other) noexcept { *this = std::move(other); }
    Place& operator=(Place&& other) noexcept;
    ~Place() { Reset(); }
    std::uint64_t offset() const { return offset_; }
    std::uint64_t bytes() const { return bytes_; }
    void Reset();

   private:
    friend class StagingRing;
    StagingRing* ring_ = nullptr;
    std::uint64_t id_ = 0;
    std::uint64_t offset_ = 0;
    std::uint64_t bytes_ = 0;
  };

  // Waits for room. INVALID_ARGUMENT if `bytes` can never fit, UNAVAILABLE once closed.
  absl::StatusOr<Place> Take(std::uint64_t bytes);
  // Waiters get UNAVAILABLE, and so do later calls.
  void Close();

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t taken() const;  // places in use, or waiting for older ones to be returned

 private:
  struct Span {
    std::uint64_t begin;
    std::uint64_t end;
    bool in_use;
  };
  std::optional<std::uint64_t> Fit(std::uint64_t bytes) const TESSERA_REQUIRES(mutex_);
  void Return(std::uint64_t id);

  const std::uint64_t bytes_;
  mutable Mutex mutex_;
  CondVar room_;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
  std::uint64_t first_id_ TESSERA_GUARDED_BY(mutex_) = 0;  // of spans_.front()
  std::deque<Span> spans_ TESSERA_GUARDED_BY(mutex_);      // oldest first
};

}  // namespace tessera::client
