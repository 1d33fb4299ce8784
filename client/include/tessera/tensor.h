// Memory for the tensors of a worker's steps: a GPU's where the worker maps one, else the host's.
// For workers without a framework of their own; others hand in what they have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::client {

class Session;

// Used by one thread at a time.
class Tensor {
 public:
  std::uint64_t size() const { return bytes_; }
  // For StepTensors; not to be followed where it is a GPU's.
  std::byte* data() const { return data_; }
  std::span<std::byte> bytes() const { return {data_, bytes_}; }

  // Copies into its beginning, or out of it. Done when they return.
  absl::Status Write(std::span<const std::byte> from);
  absl::Status Read(std::span<std::byte> to) const;

 private:
  friend class Worker;
  static absl::StatusOr<Tensor> New(std::shared_ptr<Session> session, std::uint64_t bytes);
  explicit Tensor(std::shared_ptr<Session> session) : session_(std::move(session)) {}
  absl::Status Copy(void* to, const void* from, std::uint64_t bytes) const;

  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::shared_ptr<Session> session_;  // keeps the GPU
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::vector<Line> host_;
  std::unique_ptr<kernels::cuda::Scratch> device_;
  std::unique_ptr<kernels::cuda::Queue> queue_;
};

}  // namespace tessera::client
