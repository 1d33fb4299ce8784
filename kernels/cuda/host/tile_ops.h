// Runs encode, decode, keys, gather, moments and observe on many tiles of a device at once. The
// daemon's CUDA device is built on it. kernels/format/part.h defines what each operation computes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/cuda/encode/tile_ops_params.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::kernels::cuda {

// Rows of one new tile, for TileCalls::Gather.
struct GatherTile {
  std::uint64_t tile = 0;
  std::uint64_t summaries = 0;
  std::span<const GatherRow> rows;  // tiles as device addresses
  std::uint32_t from = 0;           // index of the sources' strategy, and of the new tile's
  std::uint32_t to = 0;
};

// Returns what is wrong with a job; empty if nothing is. Kernels do not check again.
std::string_view EncodeProblem(std::span<const DeviceStrategy> strategies, ElementType type,
                               const EncodeTileJob& job);
std::string_view DecodeProblem(std::span<const DeviceStrategy> strategies,
                               const DecodeTileJob& job);
std::string_view KeysProblem(std::span<const DeviceStrategy> strategies, ElementType type,
                             const KeysTileJob& job);
std::string_view GatherProblem(std::span<const DeviceStrategy> strategies, const GatherTile& job);
std::string_view MomentsProblem(std::uint32_t head_dim, ElementType type,
                                const MomentsTileJob& job);
std::string_view ObserveProblem(const ObserveForm& form, const ObserveTileJob& job);

// Checks jobs, uploads them, launches, waits, and reports which job failed.
//
// Each call returns when its results are in device memory. It takes any number of jobs, including
// none. A bad job, or strategies of different head_dim, make the call return an Error that names
// the job; nothing is launched then. One thread at a time may use it. It keeps its scratch memory
// between calls.
class TileCalls {
 public:
  // Both must outlive this object.
  TileCalls(Runtime& runtime, Queue& queue) : queue_(queue), scratch_(runtime) {}

  // Sets `unusable` to the first job with a rotated row that is not finite, if there is one.
  Error Encode(std::span<const DeviceStrategy> strategies, ElementType type,
               std::span<const EncodeTileJob> jobs, std::optional<std::uint32_t>* unusable);
  Error Decode(std::span<const DeviceStrategy> strategies, std::span<const DecodeTileJob> jobs);
  Error Keys(std::span<const DeviceStrategy> strategies, ElementType type,
             std::span<const KeysTileJob> jobs);
  Error Gather(std::span<const DeviceStrategy> strategies, std::span<const GatherTile> jobs);
  Error Moments(std::uint32_t head_dim, ElementType type, std::span<const MomentsTileJob> jobs);
  Error Observe(const ObserveForm& form, std::span<const ObserveTileJob> jobs);

 private:
  // Uploads arrays to the device, each 16-byte aligned. Returns their addresses, and the address of
  // extra scratch bytes after them.
  Error Upload(std::span<const std::span<const std::byte>> arrays,
               std::vector<std::byte*>* addresses, std::uint64_t own_bytes = 0);

  Queue& queue_;
  Scratch scratch_;
};

}  // namespace tessera::kernels::cuda
