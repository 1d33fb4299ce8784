// Steps on a GPU: Begin uploads a StepView, each layer is launched on the step's stream, and Settle
// waits. Queries that policies observe are gathered on the device and copied to the host once, in
// Settle. Device tensors are used in place; host tensors are copied, with a wait per layer.
//
// The step image holds one selection rule per sequence, for all layers. Begin writes it with the
// rules that were last requested. If Attend requests others, it is written and uploaded again.
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
  // Both must outlive the backend.
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
  // Measures the image for the current rules.
  void MeasureImage(const StepBatch& batch);
  kernels::cuda::StepShape ShapeOf(const StepBatch& batch, bool each_head) const;
  // Whether each query head has its own selection, and therefore its own lane in the image.
  bool EachHead() const;
  // The geometry of the image's lanes.
  kernels::LayerGeometry GeometryOf(const StepBatch& batch, std::uint32_t layer) const;
  absl::Status WriteImage(const StepBatch& batch);
  using Rules = std::vector<std::optional<kernels::SelectionRule>>;  // by item
  absl::Status UseAsked(const StepBatch& batch);
  // Replaces the device's image by the host's, in the middle of a step.
  kernels::cuda::Error Replace(const StepBatch& batch);
  std::uint64_t* FaultOf(bool each_head) const;
  // The partial results of the largest layer.
  std::uint64_t PartialBytes(const StepBatch& batch) const;
  absl::Status Upload(const StepBatch& batch);
  // Allocates room for the queries of all layers, if the batch observes them.
  absl::Status PrepareQueries(const StepBatch& batch);
  // Copies the observed queries of a layer, which are kept until the step settles.
  kernels::cuda::Error KeepQueries(std::uint32_t layer, const std::byte* query,
                                   std::uint64_t token_bytes);

  // The device address of the caller's tensor: its own, or one in `copy`.
  absl::StatusOr<std::byte*> Place(std::string_view what, const void* tensor, std::uint64_t bytes,
                                   kernels::cuda::Scratch& copy, bool* copied);
  absl::StatusOr<const std::byte*> PlaceInput(std::string_view what,
                                              std::span<const std::byte> tensor,
                                              kernels::cuda::Scratch& copy);

  Gpu& gpu_;
  const Extents& extents_;
  std::unique_ptr<kernels::cuda::Queue> queue_;
  void* stream_ = nullptr;  // the caller's, used by queue_; null: queue_ has its own

  kernels::cuda::Scratch memory_;
  kernels::cuda::Scratch partial_;
  // Copies of the caller's host tensors. The stream's order separates consecutive layers.
  kernels::cuda::Scratch key_, value_, query_, output_, lse_;
  // Queries for policies: on the device, and on the host once the step has settled.
  struct LayerQueries {
    std::uint64_t at;
    std::uint64_t bytes = 0;  // 0: the layer was not attended
  };
  kernels::cuda::Scratch queries_;
  std::vector<Line> settled_queries_;
  std::vector<StepBatch::RowRun> observed_;  // rows of the batch whose queries are kept
  std::vector<LayerQueries> queries_of_;     // by layer; empty: no policy observes
  std::uint64_t queries_end_ = 0;            // end of the queries kept so far
  std::vector<Line> host_;                   // what memory_ holds
  std::vector<std::uint64_t> sinks_at_;      // per layer; 0: none
  kernels::cuda::StepShape shape_;           // with room for a selection per lane
  Rules rules_;                              // in the image
  Rules asked_;                              // requested by the current call
  bool stale_ = false;                       // the device's image differs from the host's
  std::uint32_t rule_queries_ = 0;           // limits_.queries when the rules were requested
  std::uint64_t image_at_ = 0;
  std::uint64_t image_bytes_ = 0;
  kernels::cuda::StepLimits limits_;
  std::vector<std::uint64_t> bases_;
  bool under_way_ = false;  // work on the stream has not been waited for
};

}  // namespace tessera::client
