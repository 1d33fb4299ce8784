#include "daemon/platform/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>

#include "daemon/base/strings.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace tessera {

namespace {

// Size and alignment of a huge page.
constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;

int Protection(Access access) {
  return access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
}

// Maps read-only zeros that use no memory, at `at` if flags has MAP_FIXED. Excluded from core
// dumps, like everything in a range. All such mappings have the same flags, so the kernel can merge
// them.
void* MapNothing(std::byte* at, std::uint64_t bytes, int flags) {
  void* base =
      ::mmap(at, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  if (base != MAP_FAILED) ::madvise(base, bytes, MADV_DONTDUMP);
  return base;
}

// Backs the range with huge pages, from Linux 6.1 on, even if shmem_enabled is `never` (the default
// of most systems); `deny` prevents it. With small pages, a core that reads tiles spends a fifth of
// its time on address translation. MADV_COLLAPSE needs one small page to start from, and clears a
// huge page three times as fast as 512 small ones.
void TakeHugePages(std::byte* begin, std::uint64_t bytes) {
  const std::uint64_t whole = bytes / kHugePage * kHugePage;
  const std::uint64_t page = PageBytes();
  for (std::uint64_t at = 0; at < whole; at += kHugePage) {
    if (::madvise(begin + at, page, MADV_POPULATE_WRITE) != 0) return;
  }
  ::madvise(begin, whole, MADV_COLLAPSE);
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
  const std::uint64_t page = PageBytes();
  const std::uint64_t whole = (bytes + page - 1) / page * page;
  const std::uint64_t slack = bytes >= kHugePage ? kHugePage - page : 0;
  void* base = MapNothing(nullptr, whole + slack, 0);
  if (base == MAP_FAILED) {
    return ErrnoStatus(Concat("reserving ", bytes, " bytes of address space"));
  }
  auto* begin = static_cast<std::byte*>(base);
  const std::uint64_t past = reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  const std::uint64_t before = slack == 0 || past == 0 ? 0 : kHugePage - past;
  if (before > 0) ::munmap(begin, before);
  if (slack > before) ::munmap(begin + before + whole, slack - before);
  return AddressRange(begin + before, bytes);
}

absl::StatusOr<AddressRange> AddressRange::Map(int fd, std::uint64_t bytes, Access access) {
  absl::StatusOr<AddressRange> range = Reserve(bytes);
  if (!range.ok()) return range.status();
  if (absl::Status status = range->MapAt(0, fd, bytes, access); !status.ok()) return status;
  return range;
}

absl::Status AddressRange::MapAt(std::uint64_t offset, int fd, std::uint64_t bytes, Access access) {
  if (offset > bytes_ || bytes > bytes_ - offset) {
    return absl::OutOfRangeError(Concat("mapping [", offset, ", ", offset + bytes,
                                        ") outside a range of ", bytes_, " bytes"));
  }
  void* at = ::mmap(base_ + offset, bytes, Protection(access), MAP_SHARED | MAP_FIXED, fd, 0);
  if (at == MAP_FAILED) {
    const absl::Status status = ErrnoStatus(Concat("mapping ", bytes, " bytes of shared memory"));
    // Older kernels unmap the range before they refuse the mapping. A hole would fault, and another
    // mapping of the process could be placed in it.
    (void)Reset(offset, bytes);
    return status;
  }
  ::madvise(at, bytes, MADV_DONTDUMP);
  ::madvise(at, bytes,
            MADV_HUGEPAGE);  // takes effect if the file has huge pages or gets them later
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
  if (bytes_ >= kHugePage) {  // fallocate alone would allocate small pages
    absl::StatusOr<AddressRange> range = AddressRange::Map(fd_.get(), bytes_, Access::kReadWrite);
    if (range.ok()) {
      TakeHugePages(range->data(), bytes_);
      ::madvise(range->data(), bytes_, MADV_POPULATE_WRITE);
    }
  }
  while (::fallocate(fd_.get(), 0, 0, static_cast<off_t>(bytes_)) != 0) {
    if (errno == EINTR) continue;  // a signal arrived while pages were cleared
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
