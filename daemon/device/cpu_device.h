// The CPU as a device: KV in memfds, computed by the best kernels that this machine supports.
#pragma once

#include <functional>
#include <optional>

#include "daemon/device/device.h"
#include "daemon/device/host_memory.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::device {

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const kernels::Implementation& kernels,
                     const std::optional<DeviceUuid>& uuid = std::nullopt);

  const Description& description() const override { return description_; }
  absl::Status health() const override { return absl::OkStatus(); }
  MemorySource& pool_memory() override { return pool_memory_; }
  absl::StatusOr<std::unique_ptr<Memory>> CreateWorkerMemory(std::string_view name,
                                                             std::uint64_t bytes) override;
  absl::StatusOr<std::optional<UnusableRow>> StoreRows(Place source, kernels::ElementType type,
                                                       std::span<const RowRun> runs) override;
  absl::StatusOr<std::optional<std::size_t>> Encode(std::span<const TileStrategy> strategies,
                                                    kernels::ElementType type,
                                                    std::span<const TileEncode> tiles) override;
  absl::Status Gather(const kernels::TileShape& from, const kernels::TileShape& to,
                      std::span<const TileGather> tiles) override;
  absl::Status StoreWords(std::span<const WordStore> stores) override;
  absl::Status Read(std::byte* to, const std::byte* from, std::uint64_t bytes) override;
  absl::Status Write(std::byte* to, const std::byte* from, std::uint64_t bytes) override;
  absl::StatusOr<std::unique_ptr<LaneKeys>> LoadKeys(const kernels::LayerGeometry& geometry,
                                                     std::span<const KeyRun> runs) override;
  absl::StatusOr<std::string_view> Attend(const kernels::AttendBatch& batch,
                                          const PoolView& pool) override;
  absl::StatusOr<std::string_view> Select(const kernels::AttendBatch& batch, const PoolView& pool,
                                          kernels::SelectionSink& sink) override;

 private:
  // Runs `compute` with the scratch that the batch needs.
  absl::StatusOr<std::string_view> Run(
      const kernels::AttendBatch& batch,
      const std::function<kernels::AttendResult(std::span<std::byte>)>& compute);

  const kernels::Implementation& kernels_;
  const Description description_;
  HostMemorySource pool_memory_{"tessera-pool"};
};

}  // namespace tessera::device
