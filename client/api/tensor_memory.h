// The memory behind a Tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session/session.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::client {

struct TensorMemory {
  static absl::StatusOr<std::unique_ptr<TensorMemory>> New(std::shared_ptr<Session> session,
                                                           std::uint64_t bytes);
  std::byte* data() { return device != nullptr ? device->at() : host.data()->bytes; }

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::shared_ptr<Session> session;  // keeps the GPU open
  std::vector<Line> host;
  std::unique_ptr<kernels::cuda::Scratch> device;
  std::unique_ptr<kernels::cuda::Queue> queue;
};

}  // namespace tessera::client
