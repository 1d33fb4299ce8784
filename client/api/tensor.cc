#include "tessera/tensor.h"

#include <cstring>
#include <utility>

#include "client/api/tensor_memory.h"
#include "client/error/error_info.h"
#include "client/mapped/mapped_memory.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

absl::Status Copy(const TensorMemory* memory, const char* call, void* to, const void* from,
                  std::uint64_t bytes, std::uint64_t size) {
  if (memory == nullptr) {
    return BadArgument(call, "the tensor is empty (default-constructed or moved from)");
  }
  if (bytes > size) {
    return absl::OutOfRangeError(
        Concat("a copy of ", bytes, " bytes does not fit a tensor of ", size));
  }
  if (memory->queue == nullptr) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  kernels::cuda::Error error = memory->queue->Copy(to, from, bytes);
  if (error.ok()) error = memory->queue->Wait();
  return GpuStatus(error);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorMemory>> TensorMemory::New(std::shared_ptr<Session> session,
                                                                std::uint64_t bytes) {
  Gpu* const gpu = session->mapped_memory() == nullptr ? nullptr : session->mapped_memory()->gpu();
  auto memory = std::make_unique<TensorMemory>();
  memory->session = std::move(session);
  if (gpu == nullptr) {
    memory->host.resize(bytes / sizeof(Line) + 1);
    return memory;
  }
  memory->device = std::make_unique<kernels::cuda::Scratch>(gpu->runtime());
  kernels::cuda::Error error = memory->device->Grow(bytes);
  if (error.ok()) error = gpu->runtime().NewQueue(&memory->queue);
  if (!error.ok()) return GpuStatus(error);
  return memory;
}

Tensor::Tensor() = default;
Tensor::~Tensor() = default;

Tensor::Tensor(std::unique_ptr<TensorMemory> memory, std::byte* data, std::uint64_t bytes)
    : memory_(std::move(memory)), data_(data), bytes_(bytes) {}

Tensor::Tensor(Tensor&& other) noexcept
    : memory_(std::move(other.memory_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  memory_ = std::move(other.memory_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

absl::Status Tensor::Write(std::span<const std::byte> from) {
  return Copy(memory_.get(), "Tensor::Write", data_, from.data(), from.size(), bytes_);
}

absl::Status Tensor::Read(std::span<std::byte> to) const {
  return Copy(memory_.get(), "Tensor::Read", to.data(), data_, to.size(), bytes_);
}

}  // namespace tessera::client
