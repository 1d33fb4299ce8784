// Every kind of device and its memory for tests: the CPU, and an emulated GPU that shares memory by
// descriptors or by CUDA IPC.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/device/cpu_device.h"
#include "daemon/device/cuda_device.h"
#include "daemon/platform/memfd.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/format/dense_tile.h"
#include "tests/fakes/gpu/emulated_runtime.h"
#include "tests/fakes/gpu/shared_gpu.h"
#include "tests/fakes/seed.h"

namespace tessera::device {

using kernels::ElementType;

inline constexpr std::uint64_t kPiece = std::uint64_t{2} << 20;
inline constexpr std::uint32_t kHeadDim = 64;

enum class Kind { kCpu, kGpuByDescriptor, kGpuByIpc };
// The emulated GPU's fibers need more stacks than ThreadSanitizer supports.
#ifdef __SANITIZE_THREAD__
inline constexpr Kind kKinds[] = {Kind::kCpu};
#else
inline constexpr Kind kKinds[] = {Kind::kCpu, Kind::kGpuByDescriptor, Kind::kGpuByIpc};
#endif
inline std::string KindName(const testing::TestParamInfo<Kind>& info) {
  return info.param == Kind::kCpu               ? "Cpu"
         : info.param == Kind::kGpuByDescriptor ? "GpuByDescriptor"
                                                : "GpuByIpc";
}

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

  // Memory, and a worker's mapping of it.
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

  // A part of a pool.
  struct Pool {
    std::unique_ptr<Space> space;
    std::unique_ptr<Memory> piece;
    std::byte* data() const { return piece->data(); }
  };
  Pool PoolMemory(std::uint64_t bytes = kPiece) {
    Pool pool;
    auto space = device_->pool_memory().Reserve(bytes);
    EXPECT_TRUE(space.ok()) << space.status();
    pool.space = *std::move(space);
    auto piece = pool.space->Create(0, bytes);
    EXPECT_TRUE(piece.ok()) << piece.status();
    pool.piece = *std::move(piece);
    return pool;
  }

  // Device addresses are valid on the host: the emulated GPU uses host memory.
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

  const std::uint64_t seed_ = TestSeed();
  std::mt19937_64 random_{seed_};
  tests::SharedGpu memory_{{.exports_fds = GetParam() != Kind::kGpuByIpc}};
  tests::EmulatedGpus gpus_;
  std::vector<absl::Status> failures_;
  std::unique_ptr<Device> device_;
};

}  // namespace tessera::device
