#include "tessera/tensor.h"

#include <cstring>
#include <utility>

#include "client/mapped/mapped_memory.h"
#include "client/session/session.h"
#include "daemon/base/strings.h"

namespace tessera::client {

absl::StatusOr<Tensor> Tensor::New(std::shared_ptr<Session> session, std::uint64_t bytes) {
  Gpu* const gpu = session->door() == nullptr ? nullptr : session->door()->gpu();
  Tensor tensor(std::move(session));
  tensor.bytes_ = bytes;
  if (gpu == nullptr) {
    tensor.host_.resize(bytes / sizeof(Line) + 1);
    tensor.data_ = tensor.host_.data()->bytes;
    return tensor;
  }
  tensor.device_ = std::make_unique<kernels::cuda::Scratch>(gpu->runtime());
  kernels::cuda::Error error = tensor.device_->Grow(bytes);
  if (error.ok()) error = gpu->runtime().NewQueue(&tensor.queue_);
  if (!error.ok()) return GpuStatus(error);
  tensor.data_ = tensor.device_->at();
  return tensor;
}

absl::Status Tensor::Write(std::span<const std::byte> from) {
  return Copy(data_, from.data(), from.size());
}

absl::Status Tensor::Read(std::span<std::byte> to) const {
  return Copy(to.data(), data_, to.size());
}

absl::Status Tensor::Copy(void* to, const void* from, std::uint64_t bytes) const {
  if (bytes > bytes_) {
    return absl::OutOfRangeError(
        Concat("a copy of ", bytes, " bytes from or to a tensor of ", bytes_));
  }
  if (queue_ == nullptr) {
    std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }
  kernels::cuda::Error error = queue_->Copy(to, from, bytes);
  if (error.ok()) error = queue_->Wait();
  return GpuStatus(error);
}

}  // namespace tessera::client
