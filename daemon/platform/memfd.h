// Anonymous shared memory with seals, and address ranges to map it into.
//
// A worker that could truncate a memfd would kill the daemon with SIGBUS, so every memfd that
// leaves the process is sealed against SHRINK and GROW, and against further seals. What only the
// daemon may write is also sealed FUTURE_WRITE: the daemon's own mapping, made before the seal,
// stays writable, and no later mapping or write() anywhere can be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/platform/fd.h"

namespace tessera {

enum class Access : std::uint8_t { kReadOnly, kReadWrite };

// A range of addresses. Until something is mapped into it, it reads as zeros and cannot be written;
// it costs no memory. Unmaps everything on destruction. Not thread-safe for overlapping calls.
class AddressRange {
 public:
  AddressRange() = default;
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange();

  // Large ranges begin at a multiple of 2 MiB, so that huge pages may back them.
  static absl::StatusOr<AddressRange> Reserve(std::uint64_t bytes);
  // A range that is one mapping of `fd`.
  static absl::StatusOr<AddressRange> Map(int fd, std::uint64_t bytes, Access access);

  // Maps `bytes` of fd at `offset` of the range. Page multiples only.
  absl::Status MapAt(std::uint64_t offset, int fd, std::uint64_t bytes, Access access);
  // Back to zeros; drops the reference to the file.
  absl::Status Reset(std::uint64_t offset, std::uint64_t bytes);

  std::byte* data() const { return base_; }
  std::uint64_t bytes() const { return bytes_; }
  bool valid() const { return base_ != nullptr; }

 private:
  AddressRange(std::byte* base, std::uint64_t bytes) : base_(base), bytes_(bytes) {}
  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// Who may write a memfd once it is sealed.
enum class SealFor : std::uint8_t {
  kDaemonWrites,  // SHRINK, GROW, SEAL, FUTURE_WRITE
  kWorkerWrites,  // SHRINK, GROW, SEAL
};

// A memfd of fixed size. Create; map what must stay writable; Seal; hand out.
class Memfd {
 public:
  Memfd() = default;
  static absl::StatusOr<Memfd> Create(std::string_view name, std::uint64_t bytes);

  // Allocates every page now, so that a later write cannot fail with SIGBUS for lack of memory:
  // huge ones where there are any.
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

// Memory mappings of this process; for tests and metrics.
int CountMappings();

}  // namespace tessera
