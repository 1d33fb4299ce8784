// The implementation of a step by one transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "tessera/step.h"

namespace tessera::client {

class StepEngine {
 public:
  virtual ~StepEngine() = default;
  virtual absl::Status Append(std::uint32_t layer, std::span<const std::byte> key,
                              std::span<const std::byte> value) = 0;
  virtual absl::Status Attend(std::uint32_t layer, const StepTensors& tensors) = 0;
  virtual absl::Status AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) = 0;
  virtual absl::Status End(std::span<const std::uint32_t> accepted) = 0;
  virtual bool open() const = 0;
  virtual void Abandon() = 0;
  // Called when the step is over and the caller has dropped it: any thread may then reuse the
  // engine for another step.
  virtual void Release() = 0;
};

}  // namespace tessera::client
