#include "daemon/platform/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>

#include "daemon/base/strings.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace tessera {

namespace {

int Protection(Access access) {
  return access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
}

// Zeros that cost nothing, at `at` with MAP_FIXED. Not in core dumps, like everything that is
// mapped into a range; the same flags everywhere let the kernel merge a reset place with its
// neighbours.
void* MapNothing(std::byte* at, std::uint64_t bytes, int flags) {
  void* base =
      ::mmap(at, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (base != MAP_FAILED) ::madvise(base, bytes, MADV_DONTDUMP);
  return base;
}

}  // namespace

AddressRange::AddressRange(AddressRange&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  if (this != &other) {
    if (base_ != nullptr) ::munmap(base_, bytes_);
    base_ = std::exchange(other.base_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

AddressRange::~AddressRange() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

absl::StatusOr<AddressRange> AddressRange::Reserve(std::uint64_t bytes) {
  void* base = MapNothing(nullptr, bytes, 0);
  if (base == MAP_FAILED) {
    return ErrnoStatus(Concat("reserving ", bytes, " bytes of address space"));
  }
  return AddressRange(static_cast<std::byte*>(base), bytes);
}

absl::StatusOr<AddressRange> AddressRange::Map(int fd, std::uint64_t bytes, Access access) {
  void* base = ::mmap(nullptr, bytes, Protection(access), MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return ErrnoStatus(Concat("mapping ", bytes, " bytes of shared memory"));
  }
  ::madvise(base, bytes, MADV_DONTDUMP);
  return AddressRange(static_cast<std::byte*>(base), bytes);
}

absl::Status AddressRange::MapAt(std::uint64_t offset, int fd, std::uint64_t bytes, Access access) {
  if (offset > bytes_ || bytes > bytes_ - offset) {
    return absl::OutOfRangeError(Concat("mapping [", offset, ", ", offset + bytes,
                                        ") outside a range of ", bytes_, " bytes"));
  }
  void* at = ::mmap(base_ + offset, bytes, Protection(access), MAP_SHARED | MAP_FIXED, fd, 0);
  if (at == MAP_FAILED) {
    const absl::Status status = ErrnoStatus(Concat("mapping ", bytes, " bytes of shared memory"));
    // Older kernels unmap the place before they find that the mapping is not allowed. A hole would
    // fault, and another mapping of the process could land in it.
    (void)Reset(offset, bytes);
    return status;
  }
  ::madvise(at, bytes, MADV_DONTDUMP);
  ::madvise(at, bytes, MADV_HUGEPAGE);  // fewer TLB misses where shmem huge pages are allowed
  return absl::OkStatus();
}

absl::Status AddressRange::Reset(std::uint64_t offset, std::uint64_t bytes) {
  void* at = MapNothing(base_ + offset, bytes, MAP_FIXED);
  return at == MAP_FAILED ? ErrnoStatus("unmapping shared memory") : absl::OkStatus();
}

absl::StatusOr<Memfd> Memfd::Create(std::string_view name, std::uint64_t bytes) {
  Fd fd(::memfd_create(std::string(name).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoStatus(Concat("memfd_create(", name, ")"));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(Concat("sizing ", name, " to ", bytes, " bytes"));
  }
  return Memfd(std::move(fd), bytes);
}

absl::Status Memfd::Prefault() {
  while (::fallocate(fd_.get(), 0, 0, static_cast<off_t>(bytes_)) != 0) {
    if (errno == EINTR) continue;  // a signal came while pages were cleared
    return ErrnoStatus(Concat("allocating ", bytes_, " bytes of shared memory"));
  }
  return absl::OkStatus();
}

absl::Status Memfd::Seal(SealFor who) {
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (who == SealFor::kDaemonWrites) seals |= F_SEAL_FUTURE_WRITE;
  if (::fcntl(fd_.get(), F_ADD_SEALS, seals) != 0) return ErrnoStatus("sealing shared memory");
  return absl::OkStatus();
}

std::uint64_t PageBytes() { return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)); }

int CountMappings() {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return -1;
  int lines = 0;
  for (int c = std::fgetc(maps); c != EOF; c = std::fgetc(maps)) lines += c == '\n';
  std::fclose(maps);
  return lines;
}

}  // namespace tessera
