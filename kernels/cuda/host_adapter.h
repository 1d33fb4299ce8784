// Runs a batch of host lanes on a GPU: uploads, launches, downloads. For conformance tests and
// tools; allocates and synchronises at will. Available in every build; without CUDA it is never
// supported.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "kernels/cuda/host_batch.h"

namespace tessera::kernels::cuda {

enum class HostAttendStatus : std::uint8_t {
  kOk,
  kBadLane,   // `item` is the first at fault; the others are complete
  kCudaError  // see `error`; nothing was written
};

struct HostAttendResult {
  HostAttendStatus status = HostAttendStatus::kOk;
  std::uint32_t item = 0;
  std::string_view implementation;  // "cuda", written where the GPU's results were fetched
  std::string error;
};

class HostAdapter {
 public:
  virtual ~HostAdapter() = default;
  virtual HostAttendResult Attend(const HostBatch& batch) = 0;

  // Null, and why, where this build or this machine cannot run CUDA kernels.
  static std::unique_ptr<HostAdapter> Open(int device, std::string* reason);
};

}  // namespace tessera::kernels::cuda
