// The GPU kernel benchmark, on any GPU runtime: tests pass an emulated one.
#pragma once

#include <cstdint>
#include <vector>

#include "client/bench/bench.h"
#include "client/bench/gpu/gpu_lanes.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::cli::bench {

struct GpuBenchSize {
  std::uint32_t head_dim = 128;
  std::uint32_t kv_heads = 8;
  std::vector<std::uint32_t> contexts = {8192, 32768, 131072};
  std::vector<std::uint32_t> groups = {1, 4, 8};
  // Minimum K and V of all sequences of a context: several times the L2 of the largest GPU.
  std::uint64_t least_dense_bytes = std::uint64_t{512} << 20;
  std::uint32_t rounds = 9;
  std::uint32_t replays = 10;  // of the graph, per round
  std::uint32_t threads = 1;   // host threads that generate rows and tiles
};

absl::StatusOr<Report> RunGpuOn(kernels::cuda::RuntimeSource& gpus, const GpuBenchSize& size);

// The daemon's tile operations, called as the daemon calls them: the host uploads jobs and waits.
struct GpuTilesBench {
  kernels::cuda::Runtime& runtime;
  kernels::cuda::Queue& queue;
  const GpuLanes& dense;
  const GpuLanes& packed;  // the same rows, encoded
  std::uint32_t rounds = 1;
  double copy_rate = 0;  // GB/s
};
absl::Status AddTileRows(const GpuTilesBench& bench, Report& report);

}  // namespace tessera::cli::bench
