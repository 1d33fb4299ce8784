// What a CUDA device does not serve: encoding of tiles, and selections.

#include "daemon/base/strings.h"
#include "daemon/device/cuda_device.h"

namespace tessera::device {

absl::StatusOr<std::optional<std::size_t>> CudaDevice::Encode(std::span<const TileStrategy>,
                                                              kernels::ElementType,
                                                              std::span<const TileEncode>) {
  return absl::UnimplementedError(
      Concat("device ", description_.name, " does not encode tiles in this version; the CPU does"));
}

absl::StatusOr<std::string_view> CudaDevice::Select(const kernels::AttendBatch&, const PoolView&,
                                                    kernels::SelectionSink&) {
  return absl::UnimplementedError(Concat("device ", description_.name,
                                         " does not select blocks in this version; the CPU does"));
}

absl::Status CudaDevice::CheckServed(const kernels::AttendBatch& batch) const {
  for (const kernels::AttendItem& item : batch.items) {
    if (item.selection == nullptr) continue;
    return absl::UnimplementedError(Concat("device ", description_.name,
                                           " does not attend over a selection in this version; "
                                           "the CPU does"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::device
