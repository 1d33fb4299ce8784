// What every device promises, asked of the CPU and of an emulated GPU that shares memory by
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

#include "daemon/base/strings.h"
#include "daemon/device/cpu_device.h"
#include "daemon/device/cuda_device.h"
#include "daemon/platform/memfd.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/format/dense_tile.h"
#include "tests/fakes/emulated_runtime.h"
#include "tests/fakes/shared_gpu.h"

namespace tessera::device {
namespace {

using kernels::ElementType;
using testing::HasSubstr;

constexpr std::uint64_t kPiece = std::uint64_t{2} << 20;
constexpr std::uint32_t kHeadDim = 64;

enum class Kind { kCpu, kGpuByDescriptor, kGpuByIpc };

class DeviceTest : public testing::TestWithParam<Kind> {
 protected:
  DeviceTest() {
    if (GetParam() == Kind::kCpu) {
      device_ = std::make_unique<CpuDevice>(kernels::BestImplementation());
      return;
    }
    absl::StatusOr<std::unique_ptr<CudaDevice>> gpu = CudaDevice::Create(
        {.calls = &memory_,
         .gpus = &gpus_,
         .ordinal = 0,
         .on_failure = [this](const absl::Status& why) { failures_.push_back(why); }});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    device_ = *std::move(gpu);
  }

  // Memory, and the mapping that its worker has of it.
  struct Worker {
    std::unique_ptr<Memory> memory;
    AddressRange mapping;
    std::byte* written = nullptr;
  };
  Worker WorkerMemory() {
    auto memory = device_->CreateWorkerMemory("test", kPiece);
    EXPECT_TRUE(memory.ok()) << memory.status();
    Worker worker = {.memory = *std::move(memory), .mapping = {}, .written = nullptr};
    const auto share = worker.memory->Share();
    EXPECT_TRUE(share.ok()) << share.status();
    if (!share->fd.valid()) {
      DeviceAddress opened = 0;
      EXPECT_TRUE(memory_.OpenIpc(0, share->ipc_handle, &opened).ok());
      worker.written = reinterpret_cast<std::byte*>(opened);
      return worker;
    }
    auto mapping = AddressRange::Map(share->fd.get(), kPiece, Access::kReadWrite);
    EXPECT_TRUE(mapping.ok()) << mapping.status();
    worker.mapping = *std::move(mapping);
    worker.written = worker.mapping.data();
    return worker;
  }

  // A piece of a pool.
  struct Pool {
    std::unique_ptr<Space> space;
    std::unique_ptr<Memory> piece;
    std::byte* data() const { return piece->data(); }
  };
  Pool PoolMemory() {
    Pool pool;
    auto space = device_->pool_memory().Reserve(kPiece);
    EXPECT_TRUE(space.ok()) << space.status();
    pool.space = *std::move(space);
    auto piece = pool.space->Create(0, kPiece);
    EXPECT_TRUE(piece.ok()) << piece.status();
    pool.piece = *std::move(piece);
    return pool;
  }

  // Host code may follow device addresses here: the GPU's memory is the host's.
  void Fill(std::byte* rows, std::uint32_t count, ElementType type) {
    std::normal_distribution<float> normal;
    for (std::uint32_t i = 0; i < count * kHeadDim; ++i) {
      const float x = normal(random_);
      const std::uint16_t half =
          type == ElementType::kBf16 ? kernels::FloatToBf16(x) : kernels::FloatToFp16(x);
      if (type == ElementType::kFp32) {
        std::memcpy(rows + 4 * i, &x, 4);
      } else {
        std::memcpy(rows + 2 * i, &half, 2);
      }
    }
  }

  const std::uint64_t seed_ = std::random_device{}();
  std::mt19937_64 random_{seed_};
  tests::SharedGpu memory_{{.exports_fds = GetParam() != Kind::kGpuByIpc}};
  tests::EmulatedGpus gpus_;
  std::vector<absl::Status> failures_;
  std::unique_ptr<Device> device_;
};

// A packing of all rows of a pool's dense tiles into tiles behind them.
TEST_P(DeviceTest, TilesAreEncodedOrItSaysThatItCannot) {
  const Pool pool = PoolMemory();
  const kernels::DenseTile dense = {kHeadDim, ElementType::kBf16};
  Fill(pool.data(), 2 * 2 * 32, ElementType::kBf16);  // two tiles
  kernels::TileShape shape = kernels::DenseShape(kHeadDim, ElementType::kBf16);
  shape.format = kernels::TileFormat::kPackedInt8;
  shape.kept = 16;
  shape.summary = kernels::Summary::kMean;
  shape.block = 8;
  kernels::TileShape summed = kernels::DenseShape(kHeadDim, ElementType::kBf16);
  summed.summary = kernels::Summary::kMinMax;
  summed.block = 4;
  const TileStrategy strategies[] = {{.shape = shape, .rotation = {}},
                                     {.shape = summed, .rotation = {}}};
  std::vector<TileEncode> tiles;
  for (std::uint32_t i = 0; i < 6; ++i) {
    const std::byte* const from = pool.data() + i % 2 * dense.bytes();
    tiles.push_back({.key = from,
                     .value = from + dense.value_offset(0),
                     .rows = i < 2 ? 32 : 1 + static_cast<std::uint32_t>(random_() % 32),
                     .strategy = i % 3 == 0 ? 1u : 0u,
                     .tile = pool.data() + 32768 + i * 16384});
  }
  const auto unfit = device_->Encode(strategies, ElementType::kBf16, tiles);
  if (GetParam() != Kind::kCpu) {
    EXPECT_TRUE(absl::IsUnimplemented(unfit.status())) << unfit.status();
    EXPECT_THAT(std::string(AsStringView(unfit.status().message())),
                HasSubstr("does not encode tiles in this version"));
    EXPECT_TRUE(device_->health().ok());
    return;
  }
  ASSERT_TRUE(unfit.ok()) << unfit.status();
  EXPECT_EQ(*unfit, std::nullopt);
  const kernels::Operations& operations = kernels::OperationsOf(kernels::BestImplementation());
  for (const TileEncode& tile : tiles) {
    const kernels::TileShape& to = strategies[tile.strategy].shape;
    std::vector<std::byte> prepared(operations.prepared_bytes(to, ElementType::kBf16) + 64);
    std::byte* const aligned =
        prepared.data() + (64 - reinterpret_cast<std::uintptr_t>(prepared.data()) % 64);
    operations.prepare_encode(to, ElementType::kBf16, {}, aligned);
    std::vector<std::byte> expected(kernels::LayoutOf(to).bytes);
    ASSERT_TRUE(operations.encode({.key = tile.key,
                                   .value = tile.value,
                                   .stride = dense.row_bytes(),
                                   .type = ElementType::kBf16,
                                   .rows = tile.rows,
                                   .weights = nullptr,
                                   .positions = nullptr,
                                   .shape = to,
                                   .layout = kernels::LayoutOf(to),
                                   .prepared = aligned,
                                   .tile = expected.data()}));
    EXPECT_EQ(std::memcmp(tile.tile, expected.data(), expected.size()), 0);
  }
}

TEST_P(DeviceTest, AValueBeyondFp16IsFoundInItsTile) {
  if (GetParam() != Kind::kCpu) GTEST_SKIP() << "a GPU encodes no tiles in this version";
  const Pool pool = PoolMemory();
  const kernels::DenseTile dense = {kHeadDim, ElementType::kBf16};
  Fill(pool.data(), 2 * 4 * 32, ElementType::kBf16);  // four tiles
  const std::uint16_t large = kernels::FloatToBf16(-70000.0f);
  std::memcpy(pool.data() + 2 * dense.bytes() + dense.value_offset(7) + 10, &large, sizeof large);
  kernels::TileShape shape = kernels::DenseShape(kHeadDim, ElementType::kBf16);
  shape.format = kernels::TileFormat::kPackedFp16;
  shape.kept = 8;
  const TileStrategy strategies[] = {{.shape = shape, .rotation = {}}};
  std::vector<TileEncode> tiles;
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::byte* const from = pool.data() + i * dense.bytes();
    tiles.push_back({.key = from,
                     .value = from + dense.value_offset(0),
                     .rows = 32,
                     .strategy = 0,
                     .tile = pool.data() + 65536 + i * 16384});
  }
  const auto unfit = device_->Encode(strategies, ElementType::kBf16, tiles);
  ASSERT_TRUE(unfit.ok()) << unfit.status();
  EXPECT_EQ(*unfit, std::size_t{2});
}

// A selection is honoured or refused, never ignored.
TEST_P(DeviceTest, WhoCannotSelectSaysSo) {
  if (GetParam() == Kind::kCpu) GTEST_SKIP() << "the CPU selects; end-to-end tests judge how";
  const kernels::LaneView lane;
  const kernels::SelectionRule rule;
  const std::vector<std::uint16_t> query(kHeadDim);
  std::vector<float> output(kHeadDim);
  const kernels::AttendItem item = {
      .lane = &lane, .query = query.data(), .output = output.data(), .selection = &rule};
  const kernels::AttendBatch batch = {.geometry = {.query_heads = 1,
                                                   .kv_heads = 1,
                                                   .head_dim = kHeadDim,
                                                   .type = ElementType::kBf16,
                                                   .scale = 1},
                                      .items = {&item, 1}};
  class NoSink final : public kernels::SelectionSink {
    void Take(std::uint32_t, const kernels::SelectedRun&) override {}
  };
  NoSink sink;
  EXPECT_TRUE(absl::IsUnimplemented(device_->Attend(batch, {}).status()));
  EXPECT_TRUE(absl::IsUnimplemented(device_->Select(batch, {}, sink).status()));
  EXPECT_TRUE(device_->health().ok());
}

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
      // Row 0 of run 7's V, channel 5: V of run 7 alone starts there.
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

// A worker that writes while its rows are copied changes what is stored, never what is judged.
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

INSTANTIATE_TEST_SUITE_P(Devices, DeviceTest,
                         testing::Values(Kind::kCpu, Kind::kGpuByDescriptor, Kind::kGpuByIpc),
                         [](const auto& param) {
                           return std::string(param.param == Kind::kCpu ? "Cpu"
                                              : param.param == Kind::kGpuByDescriptor
                                                  ? "GpuByDescriptor"
                                                  : "GpuByIpc");
                         });

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
