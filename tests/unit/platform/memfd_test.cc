#include "daemon/platform/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "daemon/platform/unix_socket.h"
#include "gtest/gtest.h"
#include "tests/fakes/daemon/peer_process.h"
#include "tests/fakes/hostile_mapping.h"

namespace tessera {
namespace {

constexpr std::uint64_t kBytes = 64 * 1024;

AddressRange MustReserve(std::uint64_t bytes) {
  absl::StatusOr<AddressRange> range = AddressRange::Reserve(bytes);
  EXPECT_TRUE(range.ok()) << range.status();
  return *std::move(range);
}

Memfd MustCreate(std::uint64_t bytes = kBytes) {
  absl::StatusOr<Memfd> memory = Memfd::Create("test", bytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

bool ReadsZero(const std::byte* at, std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (at[i] != std::byte{0}) return false;
  }
  return true;
}

// What a child could do with the descriptor that it received.
MappingReport TryInPeer(const Memfd& memory) {
  PeerProcess peer([](int socket) {
    std::uint64_t bytes = 0;
    Fd passed;
    if (!ReceiveMessage(socket, std::as_writable_bytes(std::span(&bytes, 1)), &passed).ok()) {
      return 1;
    }
    const MappingReport report = TryEverything(passed.get(), bytes);
    return SendMessage(socket, std::as_bytes(std::span(report))).ok() ? 0 : 2;
  });
  const std::uint64_t bytes = memory.bytes();
  EXPECT_TRUE(SendMessage(peer.socket(), std::as_bytes(std::span(&bytes, 1)), memory.fd()).ok());
  MappingReport report{};
  EXPECT_TRUE(ReceiveMessage(peer.socket(), std::as_writable_bytes(std::span(report))).ok());
  EXPECT_EQ(peer.Wait(), 0);
  return report;
}

TEST(Memfd, WhatTheDaemonWritesNobodyElseCanChangeInAnyWay) {
  Memfd memory = MustCreate();
  ASSERT_TRUE(memory.Prefault().ok());
  AddressRange range = MustReserve(kBytes);
  ASSERT_TRUE(range.MapAt(0, memory.fd(), kBytes, Access::kReadWrite).ok());
  ASSERT_TRUE(memory.Seal(SealFor::kDaemonWrites).ok());
  std::memset(range.data(), 7, kBytes);
  const MappingReport report = TryInPeer(memory);
  for (std::size_t i = 0; i < report.size(); ++i) {
    EXPECT_EQ(report[i], kMappingAttempts[i].daemon_writes)
        << kMappingAttempts[i].name << ": " << std::strerror(report[i]);
  }
  for (std::uint64_t i = 0; i < kBytes; ++i) ASSERT_EQ(range.data()[i], std::byte{7}) << i;
  std::memset(range.data(), 8, kBytes);  // the daemon's mapping remains writable
  EXPECT_EQ(range.data()[kBytes - 1], std::byte{8});
}

TEST(Memfd, WhatTheWorkerWritesKeepsItsSize) {
  Memfd memory = MustCreate();
  ASSERT_TRUE(memory.Prefault().ok());
  ASSERT_TRUE(memory.Seal(SealFor::kWorkerWrites).ok());
  absl::StatusOr<AddressRange> range = AddressRange::Map(memory.fd(), kBytes, Access::kReadOnly);
  ASSERT_TRUE(range.ok()) << range.status();
  const MappingReport report = TryInPeer(memory);
  for (std::size_t i = 0; i < report.size(); ++i) {
    EXPECT_EQ(report[i], kMappingAttempts[i].worker_writes)
        << kMappingAttempts[i].name << ": " << std::strerror(report[i]);
  }
  // Every page is still readable: nothing faults.
  EXPECT_EQ(range->data()[0], std::byte{0x5a});  // the worker's last write
  EXPECT_TRUE(ReadsZero(range->data() + 1, kBytes - 1));
}

// For any size. The ends of the larger reservation are unmapped.
TEST(AddressRange, LargeOnesBeginWhereHugePagesMay) {
  constexpr std::uint64_t kHuge = std::uint64_t{2} << 20;
  for (const std::uint64_t bytes :
       {kHuge - PageBytes(), kHuge, kHuge + 1, 3 * kHuge + PageBytes()}) {
    const int before = CountMappings();
    {
      AddressRange range = MustReserve(bytes);
      const bool aligned = reinterpret_cast<std::uintptr_t>(range.data()) % kHuge == 0;
      EXPECT_TRUE(aligned || bytes < kHuge) << bytes;
      EXPECT_TRUE(ReadsZero(range.data(), bytes));
      EXPECT_LE(CountMappings(), before + 1);
    }
    EXPECT_EQ(CountMappings(), before) << bytes;
  }
}

TEST(Memfd, EveryPageOfALargeOneIsThere) {
  constexpr std::uint64_t kLarge = 5 << 20;
  Memfd memory = MustCreate(kLarge);
  ASSERT_TRUE(memory.Prefault().ok());
  struct stat file {};
  ASSERT_EQ(fstat(memory.fd(), &file), 0);
  EXPECT_GE(static_cast<std::uint64_t>(file.st_blocks) * 512, kLarge);
  absl::StatusOr<AddressRange> range = AddressRange::Map(memory.fd(), kLarge, Access::kReadOnly);
  ASSERT_TRUE(range.ok()) << range.status();
  EXPECT_TRUE(ReadsZero(range->data(), kLarge));
}

// Huge-page bytes of the mapping that begins at `base`.
std::uint64_t BytesOnHugePages(const std::byte* base) {
  std::ifstream smaps("/proc/self/smaps");
  char begin[32];
  std::snprintf(begin, sizeof(begin), "%zx-", reinterpret_cast<std::size_t>(base));
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find(" kB") == std::string::npos) inside |= line.starts_with(begin);
    std::uint64_t kib = 0;
    if (inside && std::sscanf(line.c_str(), "ShmemPmdMapped: %" SCNu64, &kib) == 1) {
      return kib << 10;
    }
  }
  return 0;
}

TEST(Memfd, ALargeOneIsOnHugePagesWhereTheSystemHasSome) {
  constexpr std::uint64_t kHuge = std::uint64_t{2} << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, of Linux 6.1
  {
    Memfd plain = MustCreate(kHuge);
    absl::StatusOr<AddressRange> range = AddressRange::Map(plain.fd(), kHuge, Access::kReadWrite);
    ASSERT_TRUE(range.ok()) << range.status();
    range->data()[0] = std::byte{1};
    if (::madvise(range->data(), kHuge, kCollapse) != 0) {
      GTEST_SKIP() << "no huge pages of shared memory here: " << std::strerror(errno);
    }
  }
  Memfd memory = MustCreate(5 << 20);
  ASSERT_TRUE(memory.Prefault().ok());
  absl::StatusOr<AddressRange> range = AddressRange::Map(memory.fd(), 5 << 20, Access::kReadOnly);
  ASSERT_TRUE(range.ok()) << range.status();
  EXPECT_TRUE(ReadsZero(range->data(), 5 << 20));  // and is mapped, page by page
  EXPECT_GE(BytesOnHugePages(range->data()), kHuge);
}

TEST(AddressRange, ReadsZerosWhereNothingIsMapped) {
  AddressRange range = MustReserve(4 * kBytes);
  EXPECT_TRUE(ReadsZero(range.data(), range.bytes()));
  Memfd memory = MustCreate();
  ASSERT_TRUE(range.MapAt(kBytes, memory.fd(), kBytes, Access::kReadWrite).ok());
  std::memset(range.data() + kBytes, 1, kBytes);
  EXPECT_TRUE(ReadsZero(range.data(), kBytes));
  EXPECT_TRUE(ReadsZero(range.data() + 2 * kBytes, 2 * kBytes));
  ASSERT_TRUE(range.Reset(kBytes, kBytes).ok());
  EXPECT_TRUE(ReadsZero(range.data(), range.bytes()));
}

TEST(AddressRange, AFailedMappingLeavesThePlaceReadable) {
  Memfd memory = MustCreate();
  ASSERT_TRUE(memory.Seal(SealFor::kDaemonWrites).ok());
  AddressRange range = MustReserve(2 * kBytes);
  const absl::Status status = range.MapAt(0, memory.fd(), kBytes, Access::kReadWrite);
  ASSERT_FALSE(status.ok());
  EXPECT_TRUE(ReadsZero(range.data(), range.bytes()));  // would fault in a hole
  ASSERT_TRUE(range.MapAt(0, memory.fd(), kBytes, Access::kReadOnly).ok());
}

TEST(AddressRange, RefusesWhatLiesOutside) {
  AddressRange range = MustReserve(2 * kBytes);
  Memfd memory = MustCreate(4 * kBytes);
  for (const auto& [offset, bytes] : {std::pair<std::uint64_t, std::uint64_t>{0, 3 * kBytes},
                                      {kBytes, 2 * kBytes},
                                      {3 * kBytes, kBytes},
                                      {~std::uint64_t{0} - 4095, 2 * 4096}}) {
    EXPECT_EQ(range.MapAt(offset, memory.fd(), bytes, Access::kReadOnly).code(),
              absl::StatusCode::kOutOfRange)
        << offset << " + " << bytes;
  }
}

TEST(AddressRange, CameAndWentLeavesNoMappingBehind) {
  const int before = CountMappings();
  const int fds = CountOpenFds();
  for (int i = 0; i < 20; ++i) {
    AddressRange range = MustReserve(8 * kBytes);
    Memfd memory = MustCreate();
    for (std::uint64_t at = 0; at < 8; ++at) {
      ASSERT_TRUE(range.MapAt(at * kBytes, memory.fd(), kBytes, Access::kReadWrite).ok());
    }
    for (std::uint64_t at = 0; at < 8; at += 2) {
      ASSERT_TRUE(range.Reset(at * kBytes, kBytes).ok());
    }
    AddressRange moved = std::move(range);
    EXPECT_FALSE(range.valid());
  }
  EXPECT_LE(CountMappings(), before + 10);  // the heap or a sanitizer may have grown
  EXPECT_EQ(CountOpenFds(), fds);
}

TEST(AddressRange, AResetPlaceMergesWithItsNeighbours) {
  constexpr std::uint64_t kPlaces = 64;
  AddressRange range = MustReserve(kPlaces * kBytes);
  Memfd memory = MustCreate();
  const int before = CountMappings();
  for (std::uint64_t at = 0; at < kPlaces; at += 2) {
    ASSERT_TRUE(range.MapAt(at * kBytes, memory.fd(), kBytes, Access::kReadWrite).ok());
  }
  for (std::uint64_t at = 0; at < kPlaces; at += 2) {
    ASSERT_TRUE(range.Reset(at * kBytes, kBytes).ok());
  }
  // Otherwise a pool that grows and shrinks for weeks would hit the limit of mappings.
  EXPECT_LE(CountMappings(), before + 2);
}

TEST(Memfd, ASizeThatCannotBeIsAnErrorThatNamesIt) {
  const absl::StatusOr<Memfd> memory = Memfd::Create("huge", ~std::uint64_t{0});
  ASSERT_FALSE(memory.ok());
  EXPECT_NE(memory.status().ToString().find("huge"), std::string::npos) << memory.status();
}

}  // namespace
}  // namespace tessera
