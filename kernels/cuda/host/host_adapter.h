// Runs a batch of host lanes on a device: uploads, launches, downloads. For conformance tests and
// tools; allocates and waits at will.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/cuda/host/host_batch.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::kernels::cuda {

enum class HostAttendStatus : std::uint8_t {
  kOk,
  kBadLane,   // `item` is the first at fault; the others are complete
  kCudaError  // see `error`; nothing was written
};

struct HostAttendResult {
  HostAttendStatus status = HostAttendStatus::kOk;
  std::uint32_t item = 0;
  std::uint64_t fault = kNoFault;   // the word that says which item
  std::string_view implementation;  // written where the device's results were fetched
  std::string error;
};

HostAttendResult AttendOnDevice(Runtime& runtime, const HostBatch& batch);

class HostSelectionSink {
 public:
  virtual ~HostSelectionSink() = default;
  virtual void Take(std::uint32_t item, const TakenEntries& run) = 0;
};

// What AttendOnDevice would read of items with a rule; outputs are not touched. Nothing is taken
// where the status is not kOk.
HostAttendResult SelectOnDevice(Runtime& runtime, const HostBatch& batch, HostSelectionSink& sink);

}  // namespace tessera::kernels::cuda
