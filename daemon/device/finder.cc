#include "daemon/device/finder.h"

#include <utility>

#include "daemon/base/strings.h"
#include "daemon/device/cpu_device.h"
#include "daemon/device/cuda_device.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::device {

absl::StatusOr<std::uint64_t> Finder::OpenCuda(int ordinal) {
  absl::StatusOr<std::uint64_t> bytes = TryCuda(ordinal);
  if (!bytes.ok()) why_no_cuda_ = AsStringView(bytes.status().message());
  return bytes;
}

absl::StatusOr<std::uint64_t> Finder::TryCuda(int ordinal) {
  if (calls_ == nullptr) {
    absl::StatusOr<std::unique_ptr<CudaCalls>> calls = load_cuda_();
    if (!calls.ok()) return calls.status();
    calls_ = *std::move(calls);
  }
  absl::StatusOr<std::unique_ptr<CudaDevice>> device =
      CudaDevice::Create({.calls = calls_.get(),
                          .gpus = &gpus_,
                          .ordinal = ordinal,
                          .on_failure = [this](const absl::Status& why) { Failed(why); }});
  if (!device.ok()) return device.status();
  const std::uint64_t bytes = (*device)->memory_bytes();
  device_ = *std::move(device);
  return bytes;
}

void Finder::OpenCpu() { device_ = std::make_unique<CpuDevice>(kernels::BestImplementation()); }

void Finder::OnFailure(std::function<void(const absl::Status& why)> handler) {
  MutexLock lock(mutex_);
  on_failure_ = std::move(handler);
}

void Finder::Failed(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (on_failure_) on_failure_(why);
}

}  // namespace tessera::device
