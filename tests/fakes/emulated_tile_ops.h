// The tile operations' kernels, launched as kernels/cuda/tile_ops.cu does but on the emulated
// machine.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/tile_ops.h"

namespace tessera::tests {

// `runtime` is an emulated one: its queue copies and waits.
std::unique_ptr<kernels::cuda::TileQueue> NewEmulatedTileQueue(kernels::cuda::Runtime& runtime,
                                                               std::uint64_t seed);

}  // namespace tessera::tests
