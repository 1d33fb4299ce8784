// Steps on a GPU: Begin uploads a StepView, every layer is launched on the step's stream, and
// Settle waits. Queries that policies ask for are gathered on the device, and come with one copy
// then. Tensors that are device memory are used where they are; those in host memory go
// through copies, which costs a wait per layer.
//
// An image holds a selection rule of each sequence for all of its layers. Begin writes it with the
// rules that were asked for last; where Attend asks for others, it is written and uploaded again.
//
//   device memory of a step:   fault words | the sinks of each layer that has some | step image
//                              partial results, for the largest layer
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "client/gpu/gpu.h"
#include "client/mapped/extents.h"
#include "client/step/step_backend.h"
#include "kernels/cuda/common/params.h"
#include "kernels/cuda/host/runtime.h"
#include "kernels/cuda/host/step_writer.h"

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
  std::span<const std::byte> SettledQueries(std::uint32_t layer) const override;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  absl::Status TakeQueue(void* stream);
  void Measure(const StepBatch& batch);
  // For the rules as they are.
  void MeasureImage(const StepBatch& batch);
  kernels::cuda::StepShape ShapeOf(const StepBatch& batch, bool each_head) const;
  // Whether every query head chooses for itself: then each has a lane of its own in the image.
  bool EachHead() const;
  // As the image has it.
  kernels::LayerGeometry GeometryOf(const StepBatch& batch, std::uint32_t layer) const;
  absl::Status WriteImage(const StepBatch& batch);
  using Rules = std::vector<std::optional<kernels::SelectionRule>>;  // by item
  absl::Status UseAsked(const StepBatch& batch);
  // The image on the device by the one on the host, in the middle of a step.
  kernels::cuda::Error Replace(const StepBatch& batch);
  std::uint64_t* FaultOf(bool each_head) const;
  // The largest layer's.
  std::uint64_t PartialBytes(const StepBatch& batch) const;
  absl::Status Upload(const StepBatch& batch);
  // Room for the queries of all layers, where the batch asks for them.
  absl::Status PrepareQueries(const StepBatch& batch);
  // They stay until the step settles.
  kernels::cuda::Error KeepQueries(std::uint32_t layer, const std::byte* query,
                                   std::uint64_t token_bytes);

  // A place on the device for a tensor of the caller's: itself, or one in `copy`.
  absl::StatusOr<std::byte*> Place(std::string_view what, const void* tensor, std::uint64_t bytes,
                                   kernels::cuda::Scratch& copy, bool* copied);
  absl::StatusOr<const std::byte*> PlaceInput(std::string_view what,
                                              std::span<const std::byte> tensor,
                                              kernels::cuda::Scratch& copy);

  Gpu& gpu_;
  const Extents& extents_;
  std::unique_ptr<kernels::cuda::Queue> queue_;
  void* stream_ = nullptr;  // the caller's that queue_ is on; null: one of its own

  kernels::cuda::Scratch memory_;
  kernels::cuda::Scratch partial_;
  // Of the caller's host tensors. The stream's order keeps one layer's from the next one's.
  kernels::cuda::Scratch key_, value_, query_, output_, lse_;
  // Queries for policies: on the device, and once the step has settled here.
  struct LayerQueries {
    std::uint64_t at;
    std::uint64_t bytes = 0;  // 0: it was not attended to
  };
  kernels::cuda::Scratch queries_;
  std::vector<Line> settled_queries_;
  std::vector<StepBatch::RowRun> observed_;  // rows of the batch that are kept
  std::vector<LayerQueries> queries_of_;     // by layer; empty: nobody asks
  std::uint64_t queries_end_ = 0;            // of what was kept
  std::vector<Line> host_;                   // what memory_ holds
  std::vector<std::uint64_t> sinks_at_;      // per layer; 0: none
  kernels::cuda::StepShape shape_;           // with room for a selection of every lane
  Rules rules_;                              // of the image
  Rules asked_;                              // by the call that is under way
  bool stale_ = false;                       // it is not what the host has
  std::uint32_t rule_queries_ = 0;           // limits_.queries where it was asked for
  std::uint64_t image_at_ = 0;
  std::uint64_t image_bytes_ = 0;
  kernels::cuda::StepLimits limits_;
  std::vector<std::uint64_t> bases_;
  bool under_way_ = false;  // something was put on the stream and not waited for
};

}  // namespace tessera::client
