// The tile operations of a device as a table of operations on host memory: uploads, launches and
// copies back, one call each.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/host/runtime.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// A device of this process, opened when it is first asked for.
struct TileDevice {
  std::unique_ptr<cuda::Runtime> runtime;  // null: there is none, see `reason`
  std::unique_ptr<cuda::Queue> queue;
  std::string reason;
};

// The machine's first GPU; and the emulated machine.
const TileDevice& RealTileDevice();
const TileDevice& EmulatedTileDevice();

// encode (with what it needs), decode, gather, moments, observe; the others are null. Each answers
// what its device says that has run. An error of the device is a failed test.
const Operations& RealTileOperations();
const Operations& EmulatedTileOperations();

}  // namespace tessera::kernels
