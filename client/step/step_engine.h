// How a transport performs a step.
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
  // The step is over, and the caller has finished with it: the next call, of any thread, may begin
  // another step in its place.
  virtual void Release() = 0;
};

}  // namespace tessera::client
