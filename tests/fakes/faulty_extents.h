// Pool memory whose allocation fails when the test asks for it.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "daemon/device/cpu_device.h"
#include "daemon/device/host_memory.h"

namespace tessera {

// Real shared memory for the first `allowed` extents; further ones fail.
class FaultyExtents final : public device::MemorySource {
 public:
  absl::StatusOr<std::unique_ptr<device::Space>> Reserve(std::uint64_t bytes) override {
    absl::StatusOr<std::unique_ptr<device::Space>> real = real_.Reserve(bytes);
    if (!real.ok()) return real.status();
    return std::make_unique<FaultySpace>(*this, *std::move(real));
  }

  void Allow(std::uint64_t extents) { allowed_ = extents; }
  std::uint64_t created() const { return created_; }

 private:
  class FaultySpace final : public device::Space {
   public:
    FaultySpace(FaultyExtents& source, std::unique_ptr<device::Space> real)
        : source_(source), real_(std::move(real)) {}
    absl::StatusOr<std::unique_ptr<device::Memory>> Create(std::uint64_t offset,
                                                           std::uint64_t bytes) override {
      if (source_.allowed_ == 0) {
        return absl::ResourceExhaustedError("the device has no memory left");
      }
      --source_.allowed_;
      ++source_.created_;
      return real_->Create(offset, bytes);
    }
    std::byte* base() const override { return real_->base(); }

   private:
    FaultyExtents& source_;
    const std::unique_ptr<device::Space> real_;
  };

  device::HostMemorySource real_{"tessera-test"};
  std::uint64_t allowed_ = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t created_ = 0;
};

// The CPU device with pools of FaultyExtents.
class FaultyDevice final : public device::CpuDevice {
 public:
  FaultyDevice() : CpuDevice(kernels::BestImplementation()) {}
  device::MemorySource& pool_memory() override { return extents; }
  FaultyExtents extents;
};

}  // namespace tessera
