// A node on one kind of device, whose keys token policies score.
#pragma once

#include <gmock/gmock.h>

#include <memory>
#include <optional>
#include <utility>

#include "daemon/device/cuda_device.h"
#include "kernels/dispatch/implementation.h"
#include "tests/fakes/gpu/counting_device.h"
#include "tests/fakes/gpu/emulated_runtime.h"
#include "tests/fakes/gpu/shared_gpu.h"
#include "tests/unit/cache/packed.h"

namespace tessera::compaction {

enum class DeviceKind { kCpu, kGpu };

// A node on one kind of device, and helpers to query it.
class TestNode {
 public:
  explicit TestNode(DeviceKind kind)
      : device_(Open(kind)),
        watched_(*device_),
        world_({.ring_tiles = 4, .device = &watched_, .pool_extent_bytes = std::uint64_t{2} << 20}),
        worker_(std::in_place, world_.tenant(), world_.OpenSession()) {}
  ~TestNode() {
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_.ExpectBaseline();
  }

  tests::CountingDevice& device() { return watched_; }
  cache::World& world() { return world_; }
  std::shared_ptr<cache::Sequence> NewSequence(const cache::ModelSpec& spec) {
    model_ = world_.Register(spec);
    return world_.NewSequence(worker_->session(), *model_);
  }
  const cache::Model& model() const { return *model_; }

 private:
  std::unique_ptr<device::Device> Open(DeviceKind kind) {
    if (kind == DeviceKind::kCpu) {
      return std::make_unique<device::CpuDevice>(kernels::BestImplementation());
    }
    auto gpu = device::CudaDevice::Create({.calls = &memory_, .gpus = &gpus_, .ordinal = 0});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *std::move(gpu);
  }

  tests::SharedGpu memory_;
  tests::EmulatedGpus gpus_;
  const std::unique_ptr<device::Device> device_;
  tests::CountingDevice watched_;
  cache::World world_;
  std::optional<cache::TestWorker> worker_;
  std::shared_ptr<const cache::Model> model_;
};

}  // namespace tessera::compaction
