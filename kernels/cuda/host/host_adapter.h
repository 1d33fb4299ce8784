// Runs a batch of host lanes on a device: uploads, launches, downloads. For conformance tests and
// tools only: it allocates and waits freely.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/cuda/host/host_batch.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::kernels::cuda {

enum class HostAttendStatus : std::uint8_t {
  kOk,
  kBadLane,   // `item` is the first bad item; the others are complete
  kCudaError  // see `error`; nothing was written
};

struct HostAttendResult {
  HostAttendStatus status = HostAttendStatus::kOk;
  std::uint32_t item = 0;
  std::uint64_t fault = kNoFault;   // the device's fault word, which identifies the item
  std::string_view implementation;  // set if the device's results were downloaded
  std::string error;
};

HostAttendResult AttendOnDevice(Runtime& runtime, const HostBatch& batch);

class HostSelectionSink {
 public:
  virtual ~HostSelectionSink() = default;
  virtual void Take(std::uint32_t item, const SelectedEntries& run) = 0;
};

// Selects blocks for items with a rule, as AttendOnDevice would, and leaves outputs untouched.
// `sink` receives nothing unless the status is kOk.
HostAttendResult SelectOnDevice(Runtime& runtime, const HostBatch& batch, HostSelectionSink& sink);

}  // namespace tessera::kernels::cuda
