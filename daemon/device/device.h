// A device stores KV and computes on it. `cpu` and `cuda:N` implement this interface; code above it
// does not distinguish them.
//
// Thread-safe. A failure is permanent: every later call returns UNAVAILABLE with the cause. The
// daemon keeps serving calls that need no device (Free, Describe, Stats).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/device/memory.h"
#include "daemon/platform/device_uuid.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/element.h"
#include "kernels/format/part.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"
#include "kernels/tokens/attention.h"

namespace tessera::device {

// Memory that holds the rows of a request.
enum class Place : std::uint8_t {
  kHost,    // the daemon's own memory: an inline tensor
  kDevice,  // memory that a worker writes: its staging arena or its tail rings
};

// K and V rows of one lane to be copied into one tile.
struct RowRun {
  const std::byte* key;     // first row
  const std::byte* value;   // null: K rows only
  std::uint64_t stride;     // bytes between source rows
  std::byte* key_target;    // target rows are consecutive
  std::byte* value_target;  // likewise
  std::uint32_t rows;
  std::uint32_t row_bytes;
};

// The first row that may not be stored, ordered by run, then K before V, then row.
struct UnusableRow {
  std::size_t run;
  std::uint32_t row;
  bool of_value;
  std::uint32_t channel;
};

// The largest squared errors of a row that may be stored (kernels::EncodeJob); planes only.
struct ErrorLimits {
  float key = __builtin_inff();
  float value = __builtin_inff();
};

// How a tile is stored. The rotations are in the pool; null means identity.
struct TileStrategy {
  kernels::TileShape shape;
  kernels::RotationView rotation;
  ErrorLimits limits = {};
};

// Address of a tile and of its block summaries; null if its shape has none.
struct TilePlace {
  std::byte* tile = nullptr;
  std::byte* summaries = nullptr;
};

// Entries to be re-encoded into a tile of another form. Source rows are consecutive and in the
// pool.
struct TileEncode {
  const std::byte* key;                      // first row
  const std::byte* value;                    // first row
  const float* weights = nullptr;            // [rows], in the pool; null: 1
  const std::uint32_t* positions = nullptr;  // [rows], in the pool; null: 0, 1, 2, ...
  std::uint32_t rows;                        // 1 .. 32
  std::uint32_t strategy;                    // index
  TilePlace to;                              // every byte is written
};

// Rows of tiles to be copied, as stored, into a new tile.
struct TileGather {
  std::span<const kernels::GatherRow> rows;  // 1 .. 32, of tiles in the pool
  TilePlace to;                              // every byte is written
};

struct WordStore {
  std::byte* address;
  std::uint64_t word;
};

// Consecutive entries of a lane whose keys are stored in the same form.
struct KeyRun {
  std::uint64_t entries = 0;
  // Tiles in the pool, with 32 entries each except the last.
  std::span<const std::byte* const> tiles;
  TileStrategy strategy;
  // If not null, the rows are here instead: consecutive, in the daemon's own memory.
  const std::byte* rows = nullptr;
};

// The keys of a lane in the device's memory: consecutive rows of the layer's type. Keys of packed
// tiles are rotated back; dropped channels are lost. One thread at a time may use it. Must not
// outlive its device.
class LaneKeys {
 public:
  virtual ~LaneKeys() = default;
  // Computes the attention that queries give to keys, and adds it to each look's own sums. No look
  // may read another look's sums. Returns RESOURCE_EXHAUSTED if there is not enough memory. After
  // an error the sums are undefined.
  virtual absl::Status Look(std::span<const kernels::KeyObservation> looks) = 0;
  // sums[t] += squared length of key t, for the first sums.size() keys.
  virtual absl::Status AddSquaredLengths(std::span<double> sums) = 0;
  // sums[d] += squares of channel d over the first `count` keys. sums.size() is head_dim.
  virtual absl::Status AddChannelSquares(std::uint64_t count, std::span<double> sums) = 0;
  // Copies all keys into host memory.
  virtual absl::Status Read(std::byte* to) = 0;
};

// A pool as kernels see it: the address of each extent, null if it is missing.
struct PoolView {
  std::vector<std::byte*> extents;
  std::uint64_t extent_bytes = 0;
};

class Device {
 public:
  struct Description {
    std::string name;     // "cpu", "cuda:0"
    std::string kernels;  // "avx512", "cuda"
    std::string model;    // GPU model name, for display
    // Identifies the device across processes, whose ordinals may differ. The CPU has one only if
    // the configuration gives it one.
    std::optional<DeviceUuid> uuid;
    // Sizes of memory pieces, and offsets in a space, are multiples of it.
    std::uint64_t granularity = 0;
    // Row addresses and strides in requests must be multiples of it.
    std::uint32_t row_alignment = 1;
    // Encode accepts rows in the daemon's own memory.
    bool reads_host_memory = false;
    // Number of looks that take little longer in one call than a single look.
    std::uint32_t observations_per_call = 1;
    // Memory that a worker has mapped may be freed only after the worker has closed it or exited.
    bool waits_for_importers = false;

    // "GPU-...", "MIG-...", "CPU-..." or "".
    std::string UuidText() const { return uuid.has_value() ? uuid->ToString() : std::string(); }
  };

  virtual ~Device() = default;
  virtual const Description& description() const = 0;
  // OK until the device fails.
  virtual absl::Status health() const = 0;

  // Memory for pools, written by the daemon.
  virtual MemorySource& pool_memory() = 0;
  // Creates memory for tails and staging arenas, written by one worker. `bytes` is a multiple of
  // the granularity; `name` is for display.
  virtual absl::StatusOr<std::unique_ptr<Memory>> CreateWorkerMemory(std::string_view name,
                                                                     std::uint64_t bytes) = 0;

  // Copies rows into memory that no reader sees yet, and checks the copies. The source is not
  // checked, because a worker may still be writing to it. If a row is unusable, the contents of the
  // targets are undefined.
  virtual absl::StatusOr<std::optional<UnusableRow>> StoreRows(Place source,
                                                               kernels::ElementType type,
                                                               std::span<const RowRun> runs) = 0;
  // Encodes rows of `type` into tiles that no reader sees yet: rotates, selects channels, rounds.
  // If a tile cannot be stored because a value would not be finite or an error is over its limit,
  // returns the index of the first such tile, and the contents of the tiles are undefined. Fastest
  // if tiles of the same strategy are consecutive.
  virtual absl::StatusOr<std::optional<std::size_t>> Encode(
      std::span<const TileStrategy> strategies, kernels::ElementType type,
      std::span<const TileEncode> tiles) = 0;
  // Copies rows of tiles of form `from` into tiles that no reader sees yet. These have form `to`,
  // which may differ only in weights and positions, or keep planes without their crumbs. Block
  // summaries are computed from the rows.
  virtual absl::Status Gather(const kernels::TileShape& from, const kernels::TileShape& to,
                              std::span<const TileGather> tiles) = 0;
  // Writes 8-byte aligned words of the pool.
  virtual absl::Status StoreWords(std::span<const WordStore> stores) = 0;
  // Copies device memory to the daemon's own memory.
  virtual absl::Status Read(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;
  // Copies the daemon's own memory to device memory that no reader sees yet. Nothing is checked, so
  // use it only for bytes that came from Read.
  virtual absl::Status Write(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;

  // Gathers the keys of a lane in device memory owned by the result. Returns RESOURCE_EXHAUSTED
  // with the bytes needed if there is not enough memory.
  virtual absl::StatusOr<std::unique_ptr<LaneKeys>> LoadKeys(const kernels::LayerGeometry& geometry,
                                                             std::span<const KeyRun> runs) = 0;

  // Computes attention over lanes of a pool. The views hold device addresses; queries, outputs and
  // log-sum-exps are in host memory. Items of a sequence are consecutive, one per kv head, and
  // share their query and output. Returns the name of the implementation that ran, or INTERNAL if a
  // tile is out of bounds.
  virtual absl::StatusOr<std::string_view> Attend(const kernels::AttendBatch& batch,
                                                  const PoolView& pool) = 0;
  // Selects the blocks that Attend would read. Every item must have a selection rule. Returns
  // UNIMPLEMENTED if the device does not support the selection.
  virtual absl::StatusOr<std::string_view> Select(const kernels::AttendBatch& batch,
                                                  const PoolView& pool,
                                                  kernels::SelectionSink& sink) = 0;
};

// Rounds up to whole granules.
inline std::uint64_t RoundUp(std::uint64_t bytes, std::uint64_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

}  // namespace tessera::device
