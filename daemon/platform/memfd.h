// Memfd: sealed anonymous shared memory. AddressRange: a range of addresses to map it into.
//
// A worker that could truncate a memfd could kill the daemon with SIGBUS. So every memfd that
// leaves the process is sealed with SHRINK, GROW and SEAL. Memory that only the daemon may write is
// also sealed with FUTURE_WRITE: the daemon's own mapping, made before the seal, remains writable,
// but no later mapping or write() can modify it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/platform/fd.h"

namespace tessera {

enum class Access : std::uint8_t { kReadOnly, kReadWrite };

// A range of addresses. Unmapped parts read as zeros, cannot be written, and use no memory. The
// destructor unmaps everything. Not thread-safe for overlapping calls.
class AddressRange {
 public:
  AddressRange() = default;
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange();

  // Ranges of 2 MiB and more start at a multiple of 2 MiB, so that huge pages can back them.
  static absl::StatusOr<AddressRange> Reserve(std::uint64_t bytes);
  // Reserves a range and maps `fd` over all of it.
  static absl::StatusOr<AddressRange> Map(int fd, std::uint64_t bytes, Access access);

  // Maps the first `bytes` of `fd` at `offset` of the range. Both must be multiples of the page
  // size.
  absl::Status MapAt(std::uint64_t offset, int fd, std::uint64_t bytes, Access access);
  // Unmaps a part: it reads as zeros again, and the reference to the file is dropped.
  absl::Status Reset(std::uint64_t offset, std::uint64_t bytes);

  std::byte* data() const { return base_; }
  std::uint64_t bytes() const { return bytes_; }
  bool valid() const { return base_ != nullptr; }

 private:
  AddressRange(std::byte* base, std::uint64_t bytes) : base_(base), bytes_(bytes) {}
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// Who may write a memfd after it is sealed, and the seals for it.
enum class SealFor : std::uint8_t {
  kDaemonWrites,  // SHRINK, GROW, SEAL, FUTURE_WRITE
  kWorkerWrites,  // SHRINK, GROW, SEAL
};

// A memfd of fixed size. Order of use: Create, map what must remain writable, Seal, then share
// fd().
class Memfd {
 public:
  Memfd() = default;
  static absl::StatusOr<Memfd> Create(std::string_view name, std::uint64_t bytes);

  // Allocates every page now, as huge pages if possible, so that no later write fails with SIGBUS
  // for lack of memory.
  absl::Status Prefault();
  absl::Status Seal(SealFor who);

  int fd() const { return fd_.get(); }
  std::uint64_t bytes() const { return bytes_; }

 private:
  Memfd(Fd fd, std::uint64_t bytes) : fd_(std::move(fd)), bytes_(bytes) {}
  Fd fd_;
  std::uint64_t bytes_ = 0;
};

std::uint64_t PageBytes();

// Number of memory mappings of this process; for tests and metrics.
int CountMappings();

}  // namespace tessera
