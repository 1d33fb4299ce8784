// Encode, decode, keys, gather, moments and observe of many tiles at once on a device: what a
// device of the daemon is written on. kernels/format/part.h says what each of them computes.
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

// Rows of one new tile, as TileCalls::Gather takes them.
struct GatherTile {
  std::uint64_t tile = 0;
  std::uint64_t summaries = 0;
  std::span<const GatherRow> rows;  // tiles as device addresses
  std::uint32_t from = 0;           // strategies
  std::uint32_t to = 0;
};

// Empty, or what is wrong with a job. Kernels do not look again.
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

// Checks jobs, uploads them, launches, waits, and tells which job failed.
//
// Each call returns when its results are in device memory. Any number of jobs, none included. A job
// that is wrong, or strategies of different head_dim, are an Error that names it, and nothing was
// launched. Used by one thread at a time; keeps its scratch memory from call to call.
class TileCalls {
 public:
  // Both outlive it.
  TileCalls(Runtime& runtime, Queue& queue) : queue_(queue), scratch_(runtime) {}

  // `unusable`: the first job one of whose rotated rows is not finite, if there is one.
  Error Encode(std::span<const DeviceStrategy> strategies, ElementType type,
               std::span<const EncodeTileJob> jobs, std::optional<std::uint32_t>* unusable);
  Error Decode(std::span<const DeviceStrategy> strategies, std::span<const DecodeTileJob> jobs);
  Error Keys(std::span<const DeviceStrategy> strategies, ElementType type,
             std::span<const KeysTileJob> jobs);
  Error Gather(std::span<const DeviceStrategy> strategies, std::span<const GatherTile> jobs);
  Error Moments(std::uint32_t head_dim, ElementType type, std::span<const MomentsTileJob> jobs);
  Error Observe(const ObserveForm& form, std::span<const ObserveTileJob> jobs);

 private:
  // Puts arrays one after another on the device, each 16-byte aligned: their addresses, and that of
  // as many bytes behind them as the call wants for itself.
  Error Upload(std::span<const std::span<const std::byte>> arrays,
               std::vector<std::byte*>* addresses, std::uint64_t own_bytes = 0);

  Queue& queue_;
  Scratch scratch_;
};

}  // namespace tessera::kernels::cuda
