// The stream and scratch that a call of a CudaDevice works with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/device/cuda_device.h"
#include "kernels/cuda/host/tile_ops.h"

namespace tessera::device {

// A stream, and scratch on both sides of it. Owned by CudaDevice and lent to one call at a time,
// which has exclusive use of it.
class CudaDevice::Bench {
 public:
  Bench(kernels::cuda::Runtime& runtime, std::unique_ptr<kernels::cuda::Queue> queue)
      : queue_(std::move(queue)), input_(runtime), partial_(runtime), tiles_(runtime, *queue_) {}

  kernels::cuda::Queue& queue() { return *queue_; }
  kernels::cuda::Scratch& input() { return input_; }
  kernels::cuda::Scratch& partial() { return partial_; }
  // Tile operations on the same stream, with their own scratch.
  kernels::cuda::TileCalls& tiles() { return tiles_; }
  // Host scratch of at least `bytes`. Loses its contents when it grows.
  std::byte* Host(std::uint64_t bytes) {
    if (host_.size() * sizeof(Line) < bytes) host_ = std::vector<Line>(bytes / sizeof(Line) + 1);
    return host_.data()->bytes;
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  const std::unique_ptr<kernels::cuda::Queue> queue_;
  kernels::cuda::Scratch input_;
  kernels::cuda::Scratch partial_;
  kernels::cuda::TileCalls tiles_;
  std::vector<Line> host_;
};

// A borrowed Bench. The destructor returns it to the device's free list.
class CudaDevice::Taken {
 public:
  Taken(CudaDevice& device, std::unique_ptr<Bench> bench)
      : device_(&device), bench_(std::move(bench)) {}
  Taken(Taken&&) noexcept = default;
  ~Taken() {
    if (bench_ == nullptr) return;
    MutexLock lock(device_->mutex_);
    device_->free_.push_back(std::move(bench_));
  }
  Bench& operator*() const { return *bench_; }

 private:
  CudaDevice* device_;
  std::unique_ptr<Bench> bench_;
};

}  // namespace tessera::device
