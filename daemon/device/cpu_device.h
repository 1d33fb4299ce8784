// The CPU as a device: memfds, and the best kernels that this machine runs.
#pragma once

#include "daemon/device/device.h"
#include "daemon/device/host_memory.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::device {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const kernels::Implementation& kernels);

  const Description& description() const override { return description_; }
  absl::Status health() const override { return absl::OkStatus(); }
  MemorySource& pool_memory() override { return pool_memory_; }
  absl::StatusOr<std::unique_ptr<Memory>> CreateWorkerMemory(std::string_view name,
                                                             std::uint64_t bytes) override;
  absl::StatusOr<std::optional<UnusableRow>> StoreRows(Place source, kernels::ElementType type,
                                                       std::span<const RowRun> runs) override;
  absl::Status StoreWords(std::span<const WordStore> stores) override;
  absl::Status Read(std::byte* to, const std::byte* from, std::uint64_t bytes) override;
  absl::StatusOr<std::string_view> Attend(const kernels::AttendBatch& batch,
                                          const PoolView& pool) override;

 private:
  const kernels::Implementation& kernels_;
  const Description description_;
  HostMemorySource pool_memory_{"tessera-pool"};
};

}  // namespace tessera::device
