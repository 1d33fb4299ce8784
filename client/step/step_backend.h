// How a step through mapped memory moves rows and attends, once its batch is pinned and resolved:
// on the CPU, or on a GPU. Everything runs inside the gate, but for Settle.
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

  // The batch's lanes are resolved; it stays as it is until the step is over.
  virtual absl::Status Begin(const StepBatch& batch, const StepOptions& options) = 0;
  // Into the tail rings.
  virtual absl::Status Append(const StepBatch& batch, std::uint32_t layer,
                              std::span<const std::byte> key, std::span<const std::byte> value) = 0;
  virtual absl::Status Attend(const StepBatch& batch, std::uint32_t layer,
                              const StepTensors& tensors) = 0;
  // Returns when all of it is done, and how it went. DATA_LOSS, from here or Attend: a lane led out
  // of bounds, because the pin was taken back or because it is broken; the message says which lane.
  virtual absl::Status Settle(const StepBatch& batch) = 0;
  // Once it has settled: the queries that a layer was attended with, of rows that are observed
  // alone (StepBatch::QueryRows). Empty: nobody asks, or tensors are host memory throughout.
  virtual std::span<const std::byte> SettledQueries(std::uint32_t layer) const = 0;
};

}  // namespace tessera::client
