// Steps on a GPU: Begin uploads a StepView, every layer is launched on the step's stream, and
// Settle waits. Tensors are device memory; nothing of them is read on the host.
//
//   device memory of a step:   fault word | the sinks of each layer that has some | step image
//                              partial results, for the largest layer
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "client/extents.h"
#include "client/gpu.h"
#include "client/step_backend.h"
#include "kernels/cuda/params.h"
#include "kernels/cuda/runtime.h"
#include "kernels/cuda/step_writer.h"

namespace tessera::client {

class GpuBackend final : public StepBackend {
 public:
  // Both outlive it.
  GpuBackend(Gpu& gpu, const Extents& extents);

  absl::Status Begin(const StepBatch& batch, const StepOptions& options) override;
  absl::Status Append(const StepBatch& batch, std::uint32_t layer, std::span<const std::byte> key,
                      std::span<const std::byte> value) override;
  absl::Status Attend(const StepBatch& batch, std::uint32_t layer,
                      const StepTensors& tensors) override;
  absl::Status Settle(const StepBatch& batch) override;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  absl::Status TakeQueue(void* stream);
  kernels::cuda::StepShape Measure(const StepBatch& batch);
  absl::Status WriteImage(const StepBatch& batch, const kernels::cuda::StepShape& shape);
  void AddLane(const kernels::LaneView& lane, kernels::cuda::StepWriter& writer);
  absl::Status Upload(const StepBatch& batch);

  Gpu& gpu_;
  const Extents& extents_;
  std::unique_ptr<kernels::cuda::Queue> queue_;
  void* stream_ = nullptr;  // the caller's that queue_ is on; null: one of its own

  kernels::cuda::Scratch memory_;
  kernels::cuda::Scratch partial_;
  std::vector<Line> host_;               // what memory_ holds
  std::vector<std::uint64_t> sinks_at_;  // per layer; 0: none
  std::uint64_t image_at_ = 0;
  std::uint64_t image_bytes_ = 0;
  kernels::cuda::StepLimits limits_;
  std::vector<std::uint64_t> bases_;
  std::vector<kernels::cuda::SegmentSpec> segments_;
  bool under_way_ = false;  // something was put on the stream and not waited for
};

}  // namespace tessera::client
