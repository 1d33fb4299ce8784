// Moves rows and computes attention for a step through mapped memory, on the CPU or on a GPU. The
// batch is pinned and resolved. All calls but Settle run inside the gate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "client/step/step_batch.h"
#include "tessera/step.h"

namespace tessera::client {

class StepBackend {
 public:
  virtual ~StepBackend() = default;

  // The batch's lanes are resolved, and it does not change until the step is over.
  virtual absl::Status Begin(const StepBatch& batch, const StepOptions& options) = 0;
  // Writes rows into the tail rings.
  virtual absl::Status Append(const StepBatch& batch, std::uint32_t layer,
                              std::span<const std::byte> key, std::span<const std::byte> value) = 0;
  virtual absl::Status Attend(const StepBatch& batch, std::uint32_t layer,
                              const StepTensors& tensors) = 0;
  // Waits for all work of the step and returns its status. DATA_LOSS, from here or from Attend: a
  // lane points out of bounds, because the pin was revoked or the lane is corrupt; the message
  // names the lane.
  virtual absl::Status Settle(const StepBatch& batch) = 0;
  // After Settle: the queries of a layer, of observed rows only (StepBatch::QueryRows). Empty if no
  // policy observes them, or if all tensors are host memory.
  virtual std::span<const std::byte> SettledQueries(std::uint32_t layer) const = 0;
};

}  // namespace tessera::client
