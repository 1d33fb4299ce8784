// Memory for the tensors of a worker's steps: on the GPU if the worker maps one, else on the host.
// For workers without a framework; others pass the tensors they have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"

namespace tessera::client {

struct TensorMemory;

// Used by one thread at a time. A moved-from tensor has no bytes; Write and Read then answer
// INVALID_ARGUMENT.
class Tensor {
 public:
  Tensor();
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor&& other) noexcept;
  ~Tensor();

  std::uint64_t size() const { return bytes_; }
  // For StepTensors. The host must not dereference it if it is GPU memory.
  std::byte* data() const { return data_; }
  std::span<std::byte> bytes() const { return {data_, bytes_}; }

  // Copy into its beginning, or out of it. The copy is complete when they return.
  absl::Status Write(std::span<const std::byte> from);
  absl::Status Read(std::span<std::byte> to) const;

 private:
  friend class Worker;
  Tensor(std::unique_ptr<TensorMemory> memory, std::byte* data, std::uint64_t bytes);

  std::unique_ptr<TensorMemory> memory_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace tessera::client
