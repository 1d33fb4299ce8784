#include "tests/unit/kernels/cuda/tile_ops_rig.h"

namespace tessera::tests {

TileGpu OpenTileGpu(std::uint64_t) {
  TileGpu gpu;
  gpu.runtime = kernels::cuda::SystemGpus().Open(0, &gpu.reason);
  if (gpu.runtime == nullptr) return gpu;
  const kernels::cuda::Error error = gpu.runtime->NewQueue(&gpu.queue);
  EXPECT_TRUE(error.ok()) << error.text();
  if (error.ok()) return gpu;
  return {.runtime = nullptr, .queue = nullptr, .reason = error.text()};
}

}  // namespace tessera::tests
