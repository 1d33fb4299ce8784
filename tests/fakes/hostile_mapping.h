// Attempts to misuse a received memfd in every way that a process can.
//
// Each attempt returns its errno, or 0 if it succeeded. The table lists the expected result for
// memory that only the daemon may write, and for memory that the worker may write too.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace tessera {

struct MappingAttempt {
  const char* name;
  int (*run)(int fd, std::uint64_t bytes);  // returns errno, or 0 on success
  int daemon_writes;                        // expected errno if only the daemon writes the memory
  int worker_writes;                        // expected errno if the worker writes the memory
};

namespace hostile {

inline int Result(bool failed) { return failed ? errno : 0; }

// Maps and unmaps at once: only permission is tested.
inline int Map(int fd, std::uint64_t bytes, int protection) {
  void* at = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return errno;
  ::munmap(at, bytes);
  return 0;
}

inline int Protect(int fd, std::uint64_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return -1;
  const int error = Result(::mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0);
  ::munmap(at, bytes);
  return error;
}

// Opens the descriptor again through /proc, which creates a new open file description.
inline int Reopened(int fd, int flags, int (*then)(int fd)) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const int again = ::open(path, flags | O_CLOEXEC);
  if (again < 0) return errno;
  const int error = then(again);
  ::close(again);
  return error;
}

inline int WriteByte(int fd) {
  const char byte = 0x5a;
  return Result(::pwrite(fd, &byte, 1, 0) != 1);
}

inline int Remove(int fd, std::uint64_t bytes) {
  void* at = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return -1;
  const int error = Result(::madvise(at, bytes, MADV_REMOVE) != 0);
  ::munmap(at, bytes);
  return error;
}

}  // namespace hostile

// Seals do not stop a worker from punching holes into memory that it may write. That is harmless:
// the rows then read as zeros, and no access faults.
inline constexpr auto kMappingAttempts = std::to_array<MappingAttempt>({
    {"ftruncate to 0",
     [](int fd, std::uint64_t) { return hostile::Result(::ftruncate(fd, 0) != 0); }, EPERM, EPERM},
    {"ftruncate one page off",
     [](int fd, std::uint64_t bytes) {
       return hostile::Result(::ftruncate(fd, static_cast<off_t>(bytes) - 4096) != 0);
     },
     EPERM, EPERM},
    {"ftruncate one page more",
     [](int fd, std::uint64_t bytes) {
       return hostile::Result(::ftruncate(fd, static_cast<off_t>(bytes) + 4096) != 0);
     },
     EPERM, EPERM},
    {"fallocate beyond the end",
     [](int fd, std::uint64_t bytes) {
       return hostile::Result(::fallocate(fd, 0, static_cast<off_t>(bytes), 4096) != 0);
     },
     EPERM, EPERM},
    {"write beyond the end",
     [](int fd, std::uint64_t bytes) {
       const char byte = 1;
       return hostile::Result(::pwrite(fd, &byte, 1, static_cast<off_t>(bytes)) != 1);
     },
     EPERM, EPERM},
    {"reopen with O_TRUNC",
     [](int fd, std::uint64_t) {
       return hostile::Reopened(fd, O_RDWR | O_TRUNC, [](int) { return 0; });
     },
     EPERM, EPERM},
    {"add the seal WRITE",
     [](int fd, std::uint64_t) {
       return hostile::Result(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);
     },
     EPERM, EPERM},
    {"add the seal FUTURE_WRITE",
     [](int fd, std::uint64_t) {
       return hostile::Result(::fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0);
     },
     EPERM, EPERM},
    {"add no seal",
     [](int fd, std::uint64_t) { return hostile::Result(::fcntl(fd, F_ADD_SEALS, 0) != 0); }, EPERM,
     EPERM},
    {"punch a hole",
     [](int fd, std::uint64_t bytes) {
       return hostile::Result(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                                          static_cast<off_t>(bytes)) != 0);
     },
     EPERM, 0},
    {"madvise REMOVE", &hostile::Remove, EACCES, 0},
    {"map for writing",
     [](int fd, std::uint64_t bytes) { return hostile::Map(fd, bytes, PROT_READ | PROT_WRITE); },
     EPERM, 0},
    {"map for writing alone",
     [](int fd, std::uint64_t bytes) { return hostile::Map(fd, bytes, PROT_WRITE); }, EPERM, 0},
    {"mprotect to writing", &hostile::Protect, EACCES, 0},
    {"write",
     [](int fd, std::uint64_t) {
       const char byte = 1;
       ::lseek(fd, 0, SEEK_SET);
       return hostile::Result(::write(fd, &byte, 1) != 1);
     },
     EPERM, 0},
    {"pwrite", [](int fd, std::uint64_t) { return hostile::WriteByte(fd); }, EPERM, 0},
    {"reopen and write",
     [](int fd, std::uint64_t) { return hostile::Reopened(fd, O_RDWR, &hostile::WriteByte); },
     EPERM, 0},
    {"reopen and map for writing",
     [](int fd, std::uint64_t) {
       return hostile::Reopened(
           fd, O_RDWR, [](int again) { return hostile::Map(again, 4096, PROT_READ | PROT_WRITE); });
     },
     EPERM, 0},
    {"reopen and ftruncate",
     [](int fd, std::uint64_t) {
       return hostile::Reopened(
           fd, O_RDWR, [](int again) { return hostile::Result(::ftruncate(again, 4096) != 0); });
     },
     EPERM, EPERM},
});

using MappingReport = std::array<int, kMappingAttempts.size()>;

// Runs every attempt in the calling process.
inline MappingReport TryEverything(int fd, std::uint64_t bytes) {
  MappingReport report{};
  for (std::size_t i = 0; i < kMappingAttempts.size(); ++i) {
    report[i] = kMappingAttempts[i].run(fd, bytes);
  }
  return report;
}

}  // namespace tessera
