#include "daemon/device/finder.h"

#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/device/cpu_device.h"
#include "daemon/device/cuda_device.h"
#include "daemon/platform/cuda_memory.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::device {

absl::StatusOr<std::uint64_t> Finder::OpenCuda(int ordinal) {
  absl::StatusOr<std::uint64_t> bytes = TryCuda(ordinal);
  if (!bytes.ok()) why_no_cuda_ = AsStringView(bytes.status().message());
  return bytes;
}

absl::StatusOr<std::uint64_t> Finder::OpenCuda(const DeviceUuid& uuid) {
  const absl::StatusOr<int> ordinal = OrdinalOf(uuid);
  if (ordinal.ok()) return OpenCuda(*ordinal);
  why_no_cuda_ = AsStringView(ordinal.status().message());
  return ordinal.status();
}

absl::Status Finder::Load() {
  if (calls_ != nullptr) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<CudaCalls>> calls = load_cuda_();
  if (!calls.ok()) return calls.status();
  calls_ = *std::move(calls);
  return absl::OkStatus();
}

absl::StatusOr<int> Finder::OrdinalOf(const DeviceUuid& uuid) {
  if (absl::Status status = Load(); !status.ok()) return status;
  const absl::StatusOr<std::vector<CudaDeviceInfo>> devices = ListCudaDevices(*calls_);
  if (!devices.ok()) return absl::FailedPreconditionError(devices.status().message());
  std::string visible;
  for (const CudaDeviceInfo& device : *devices) {
    if (device.uuid.bytes == uuid.bytes) return device.ordinal;
    Append(visible, visible.empty() ? "" : ", ", device.uuid.ToString());
  }
  return absl::FailedPreconditionError(Concat("this process does not see it; it sees ",
                                              visible.empty() ? "no GPU" : visible,
                                              " (CUDA_VISIBLE_DEVICES, NVIDIA_VISIBLE_DEVICES)"));
}

absl::StatusOr<std::uint64_t> Finder::TryCuda(int ordinal) {
  if (absl::Status status = Load(); !status.ok()) return status;
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

void Finder::OpenCpu(const std::optional<DeviceUuid>& uuid) {
  device_ = std::make_unique<CpuDevice>(kernels::BestImplementation(), uuid);
}

void Finder::OnFailure(std::function<void(const absl::Status& why)> handler) {
  MutexLock lock(mutex_);
  on_failure_ = std::move(handler);
}

void Finder::Failed(const absl::Status& why) {
  MutexLock lock(mutex_);
  if (on_failure_) on_failure_(why);
}

}  // namespace tessera::device
