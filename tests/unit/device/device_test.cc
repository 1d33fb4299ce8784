// The contract of all devices, tested on the CPU and on an emulated GPU that shares memory by
// descriptors or by CUDA IPC.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "daemon/platform/memfd.h"
#include "tests/unit/device/devices.h"

namespace tessera::device {
namespace {

using testing::HasSubstr;

TEST_P(DeviceTest, PiecesOfASpaceAreWhereTheyBelongAndGoWithTheirOwner) {
  auto space = device_->pool_memory().Reserve(4 * kPiece);
  ASSERT_TRUE(space.ok()) << space.status();
  const int mappings = CountMappings();
  {
    std::vector<std::unique_ptr<Memory>> pieces;
    for (const std::uint64_t place : {2, 0, 3}) {
      auto piece = (*space)->Create(place * kPiece, kPiece);
      ASSERT_TRUE(piece.ok()) << piece.status();
      EXPECT_EQ((*piece)->bytes(), kPiece);
      if (GetParam() != Kind::kGpuByIpc) {
        EXPECT_EQ((*piece)->data(), (*space)->base() + place * kPiece);
      }
      std::memset((*piece)->data(), static_cast<int>(place), kPiece);
      pieces.push_back(*std::move(piece));
    }
    for (const std::unique_ptr<Memory>& piece : pieces) {
      const auto share = piece->Share();
      ASSERT_TRUE(share.ok()) << share.status();
      EXPECT_EQ(share->bytes, kPiece);
      EXPECT_EQ(share->fd.valid(), GetParam() != Kind::kGpuByIpc);
      EXPECT_EQ(share->kind, GetParam() == Kind::kCpu ? shm::MemoryKind::kHost
                             : GetParam() == Kind::kGpuByDescriptor
                                 ? shm::MemoryKind::kCudaDescriptor
                                 : shm::MemoryKind::kCudaIpc);
    }
  }
  EXPECT_LE(CountMappings(), mappings);
  EXPECT_EQ(memory_.live(), 0u);
}

TEST_P(DeviceTest, RowsArriveAndTheFirstUnusableOneIsNamed) {
  SCOPED_TRACE(seed_);
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    const auto row_bytes = static_cast<std::uint32_t>(kHeadDim * kernels::ElementBytes(type));
    for (const Place place : {Place::kHost, Place::kDevice}) {
      const Worker worker = WorkerMemory();
      const Pool tiles = PoolMemory();
      std::vector<std::byte> host(600 * row_bytes);
      std::byte* const written = place == Place::kHost ? host.data() : worker.written;
      std::byte* const source = place == Place::kHost ? host.data() : worker.memory->data();
      Fill(written, 600, type);
      std::vector<RowRun> runs;
      std::byte* target = tiles.data();
      for (std::uint32_t i = 0; i < 9; ++i) {
        const std::uint32_t rows = 1 + random_() % 32, apart = 1 + random_() % 2;
        runs.push_back({.key = source + i * row_bytes,
                        .value = source + (300 + i) * row_bytes,
                        .stride = apart * row_bytes,
                        .key_target = target,
                        .value_target = target + rows * row_bytes,
                        .rows = rows,
                        .row_bytes = row_bytes});
        target += 2 * rows * row_bytes;
      }
      auto verdict = device_->StoreRows(place, type, runs);
      ASSERT_TRUE(verdict.ok()) << verdict.status();
      EXPECT_FALSE(verdict->has_value());
      for (const RowRun& run : runs) {
        for (std::uint32_t r = 0; r < run.rows; ++r) {
          ASSERT_EQ(
              std::memcmp(run.key_target + r * row_bytes, run.key + r * run.stride, row_bytes), 0);
          ASSERT_EQ(
              std::memcmp(run.value_target + r * row_bytes, run.value + r * run.stride, row_bytes),
              0);
        }
      }
      // Row 0 of run 7's V, channel 5: only the V of run 7 starts there.
      const float infinity = std::numeric_limits<float>::infinity();
      const std::uint16_t half = type == ElementType::kBf16 ? kernels::FloatToBf16(infinity)
                                                            : kernels::FloatToFp16(infinity);
      std::byte* const at = written + (300 + 7) * row_bytes + 5 * kernels::ElementBytes(type);
      std::memcpy(at, type == ElementType::kFp32 ? static_cast<const void*>(&infinity) : &half,
                  kernels::ElementBytes(type));
      verdict = device_->StoreRows(place, type, std::span(runs).subspan(7));
      ASSERT_TRUE(verdict.ok() && verdict->has_value());
      EXPECT_EQ((*verdict)->run, 0u);
      EXPECT_EQ((*verdict)->row, 0u);
      EXPECT_TRUE((*verdict)->of_value);
      EXPECT_EQ((*verdict)->channel, 5u);
    }
  }
}

// A worker that writes while its rows are copied may change what is stored, but the stored bytes
// are always the checked ones.
TEST_P(DeviceTest, WhatIsFoundUsableIsWhatIsStored) {
  const Worker worker = WorkerMemory();
  const Pool tiles = PoolMemory();
  std::byte* const written = worker.written;
  constexpr std::uint32_t kRows = 32, kRowBytes = kHeadDim * 2;
  Fill(written, 2 * kRows, ElementType::kBf16);
  std::atomic<bool> stop{false};
  std::thread hostile([&] {
    const std::uint16_t good = 0x3f80, bad = 0x7fc0;
    for (std::uint64_t i = 0; !stop.load(std::memory_order_relaxed); ++i) {
      std::memcpy(written + i * 34 % (2 * kRows * kRowBytes), i % 3 == 0 ? &bad : &good, 2);
    }
  });
  const RowRun run = {.key = worker.memory->data(),
                      .value = worker.memory->data() + kRows * kRowBytes,
                      .stride = kRowBytes,
                      .key_target = tiles.data(),
                      .value_target = tiles.data() + kRows * kRowBytes,
                      .rows = kRows,
                      .row_bytes = kRowBytes};
  for (int round = 0; round < 50; ++round) {
    const auto verdict = device_->StoreRows(Place::kDevice, ElementType::kBf16, {&run, 1});
    ASSERT_TRUE(verdict.ok()) << verdict.status();
    std::int64_t first = -1;
    for (const std::byte* half : {run.key_target, run.value_target}) {
      if (first < 0) {
        first = kernels::FirstUnusable(kernels::BestImplementation(), half, kRows * kHeadDim,
                                       ElementType::kBf16);
      }
    }
    ASSERT_EQ(verdict->has_value(), first >= 0);
  }
  stop.store(true);
  hostile.join();
}

TEST_P(DeviceTest, WordsAndReads) {
  const Pool pool = PoolMemory();
  std::vector<WordStore> stores;
  for (std::uint64_t i = 0; i < 3000; ++i) stores.push_back({pool.data() + 16 * i, i * i});
  ASSERT_TRUE(device_->StoreWords(stores).ok());
  for (std::uint64_t i : {0, 1, 1777, 2999}) {
    std::uint64_t word = 0;
    ASSERT_TRUE(device_->Read(reinterpret_cast<std::byte*>(&word), stores[i].address, 8).ok());
    EXPECT_EQ(word, i * i);
  }
}

TEST_P(DeviceTest, WhatIsWrittenIsReadBack) {
  const Pool pool = PoolMemory();
  std::vector<std::byte> bytes(70'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  ASSERT_TRUE(device_->Write(pool.data() + 64, bytes.data(), bytes.size()).ok());
  std::vector<std::byte> back(bytes.size());
  ASSERT_TRUE(device_->Read(back.data(), pool.data() + 64, back.size()).ok());
  EXPECT_TRUE(back == bytes);
  // Exactly these bytes.
  ASSERT_TRUE(device_->Write(pool.data() + 128, bytes.data(), 64).ok());
  ASSERT_TRUE(device_->Read(back.data(), pool.data() + 64, back.size()).ok());
  std::memcpy(bytes.data() + 64, bytes.data(), 64);
  EXPECT_TRUE(back == bytes);
}

TEST_P(DeviceTest, CallsOfManyThreadsDoNotMeet) {
  const Pool tiles = PoolMemory();
  constexpr std::uint32_t kRowBytes = kHeadDim * 2;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<std::uint16_t> rows(8 * kHeadDim, static_cast<std::uint16_t>(0x3f80 + t));
      const auto* from = reinterpret_cast<const std::byte*>(rows.data());
      std::byte* const to = tiles.data() + t * 16 * kRowBytes;
      for (int i = 0; i < 30; ++i) {
        const RowRun run = {from, from, kRowBytes, to, to + 8 * kRowBytes, 8, kRowBytes};
        const auto verdict = device_->StoreRows(Place::kHost, ElementType::kBf16, {&run, 1});
        wrong += !verdict.ok() || verdict->has_value() || std::memcmp(to, from, 8 * kRowBytes) != 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, DeviceTest, testing::ValuesIn(kKinds), KindName);

TEST(CudaDeviceTest, FailsOnceAndForGood) {
  tests::SharedGpu memory;
  tests::EmulatedGpus gpus;
  gpus.options.fails_after = 7;
  std::vector<absl::Status> told;
  auto gpu = CudaDevice::Create(
      {.calls = &memory, .gpus = &gpus, .ordinal = 0, .on_failure = [&](const absl::Status& why) {
         told.push_back(why);
       }});
  ASSERT_TRUE(gpu.ok()) << gpu.status();
  auto piece = (*gpu)->CreateWorkerMemory("test", kPiece);
  ASSERT_TRUE(piece.ok());
  const WordStore store = {(*piece)->data(), 1};
  absl::Status status;
  for (int i = 0; i < 10 && status.ok(); ++i) status = (*gpu)->StoreWords({&store, 1});
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("device cuda:0 has failed"));
  EXPECT_EQ((*gpu)->StoreWords({&store, 1}), status);
  EXPECT_EQ((*gpu)->health(), status);
  EXPECT_EQ((*gpu)->CreateWorkerMemory("test", kPiece).status(), status);
  EXPECT_EQ(told.size(), 1u);
}

}  // namespace
}  // namespace tessera::device
