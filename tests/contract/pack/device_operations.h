// Wraps a device's tile operations as a table of operations on host memory. Each call uploads,
// launches and copies back.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/host/runtime.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// A device of this process, opened on first use.
struct TileDevice {
  std::unique_ptr<cuda::Runtime> runtime;  // null if there is none; `reason` says why
  std::unique_ptr<cuda::Queue> queue;
  std::string reason;
};

// The first real GPU, and the emulated GPU.
const TileDevice& RealTileDevice();
const TileDevice& EmulatedTileDevice();

// Has encode (with prepare_encode), decode, gather, moments and observe; the others are null. Each
// returns the implementation name that the device reports. A device error fails the test.
const Operations& RealTileOperations();
const Operations& EmulatedTileOperations();

}  // namespace tessera::kernels
