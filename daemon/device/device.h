// A device: where KV lives and who computes on it. `cpu` and `cuda:N` implement it; everything
// above knows no difference.
//
// Thread-safe. A device that fails, fails for good: every later call answers UNAVAILABLE with what
// went wrong, and the daemon serves what needs no device (Free, Describe, Stats).
#pragma once

#include <array>
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
#include "kernels/dispatch/attend.h"
#include "kernels/format/element.h"
#include "kernels/format/part.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"
#include "kernels/tokens/attention.h"

namespace tessera::device {

// Where the bytes of a request are.
enum class Place : std::uint8_t {
  kHost,    // in the daemon's own memory: an inline tensor
  kDevice,  // in memory that a worker writes: its staging arena, its tail rings
};

// K and V rows of one lane on their way into one tile.
struct RowRun {
  const std::byte* key;     // of the first row
  const std::byte* value;   // null: there are K rows alone
  std::uint64_t stride;     // bytes between source rows
  std::byte* key_target;    // target rows lie one after another
  std::byte* value_target;  // likewise
  std::uint32_t rows;
  std::uint32_t row_bytes;
};

// The first row that may not be kept, by run, K before V, then by row.
struct UnusableRow {
  std::size_t run;
  std::uint32_t row;
  bool of_value;
  std::uint32_t channel;
};

// How a tile is stored. The rotations lie in the pool; null: the identity.
struct TileStrategy {
  kernels::TileShape shape;
  kernels::RotationView rotation;
};

// Where a tile is, and the summaries of its blocks; null: its shape has none.
struct TilePlace {
  std::byte* tile = nullptr;
  std::byte* summaries = nullptr;
};

// Entries on their way into a tile of another form. Rows lie one after another, in the pool.
struct TileEncode {
  const std::byte* key;                      // of the first row
  const std::byte* value;                    // likewise
  const float* weights = nullptr;            // [rows], in the pool; null: 1
  const std::uint32_t* positions = nullptr;  // [rows], in the pool; null: 0, 1, 2, ...
  std::uint32_t rows;                        // 1 .. 32
  std::uint32_t strategy;                    // index
  TilePlace to;                              // all of its bytes are written
};

// Rows of tiles on their way into a new one, as they are stored.
struct TileGather {
  std::span<const kernels::GatherRow> rows;  // 1 .. 32, of tiles in the pool
  TilePlace to;                              // all of its bytes are written
};

struct WordStore {
  std::byte* address;
  std::uint64_t word;
};

// Entries of a lane whose keys are stored alike, and follow one another.
struct KeyRun {
  std::uint64_t entries = 0;
  // In tiles of the pool, 32 entries each but for the last.
  std::span<const std::byte* const> tiles;
  TileStrategy strategy;
  // Not null: the rows themselves instead, one after another in the daemon's own memory.
  const std::byte* rows = nullptr;
};

// The keys of a lane where the device computes: rows of the layer's type, one after another. Keys
// of packed tiles are what was kept of them, rotated back. Used by one thread at a time; goes
// before its device.
class LaneKeys {
 public:
  virtual ~LaneKeys() = default;
  // What queries pay to keys: each look adds to its own sums, and none may read those of another.
  // RESOURCE_EXHAUSTED where there is no memory for it; sums hold anything where it fails.
  virtual absl::Status Look(std::span<const kernels::KeyLook> looks) = 0;
  // sums[t] += the squared length of key t. As many as there are sums.
  virtual absl::Status AddSquaredLengths(std::span<double> sums) = 0;
  // sums[d] += the squares of channel d of the first `count` keys. As many as head_dim.
  virtual absl::Status AddChannelSquares(std::uint64_t count, std::span<double> sums) = 0;
  // All of them, into host memory.
  virtual absl::Status Read(std::byte* to) = 0;
};

// A pool as kernels see it: the address of each extent, null where there is none.
struct PoolView {
  std::vector<std::byte*> extents;
  std::uint64_t extent_bytes = 0;
};

class Device {
 public:
  struct Description {
    std::string name;     // "cpu", "cuda:0"
    std::string kernels;  // "avx512", "cuda"
    std::string model;    // of the GPU; for people
    // What a worker finds the same GPU by: ordinals differ between processes. Empty: no GPU.
    std::optional<std::array<std::byte, 16>> uuid;
    // Sizes of pieces and offsets in a space are multiples of it.
    std::uint64_t granularity = 0;
    // Addresses and strides of rows are multiples of it, in whatever a request points to.
    std::uint32_t row_alignment = 1;
    // Encode takes rows from the daemon's own memory.
    bool reads_host_memory = false;
    // So many looks at keys in one call take little longer than one alone.
    std::uint32_t looks_at_once = 1;
    // What a worker has mapped may be given back only when the worker has closed it or is gone.
    bool waits_for_importers = false;
  };

  virtual ~Device() = default;
  virtual const Description& description() const = 0;
  // OK until it fails.
  virtual absl::Status health() const = 0;

  // Of pools: written by the daemon.
  virtual MemorySource& pool_memory() = 0;
  // Of tails and staging arenas: written by one worker. `bytes` is a multiple of the granularity;
  // `name` is for people.
  virtual absl::StatusOr<std::unique_ptr<Memory>> CreateWorkerMemory(std::string_view name,
                                                                     std::uint64_t bytes) = 0;

  // Copies rows into memory that no reader sees yet, and judges what it has copied, never the
  // source: that may belong to a worker that is writing there. Targets hold anything where a row is
  // not usable.
  virtual absl::StatusOr<std::optional<UnusableRow>> StoreRows(Place source,
                                                               kernels::ElementType type,
                                                               std::span<const RowRun> runs) = 0;
  // Rotates, selects and rounds rows of `type` into tiles that no reader sees yet. Returns the
  // index of the first tile that cannot be stored so, because a value is then not finite; tiles
  // hold anything in that case. Fastest where tiles of one strategy follow one another.
  virtual absl::StatusOr<std::optional<std::size_t>> Encode(
      std::span<const TileStrategy> strategies, kernels::ElementType type,
      std::span<const TileEncode> tiles) = 0;
  // Copies rows of tiles of the form `from` into tiles that no reader sees yet. These are of the
  // form `to`, which differs in weights and positions alone; blocks are summed up from the rows.
  virtual absl::Status Gather(const kernels::TileShape& from, const kernels::TileShape& to,
                              std::span<const TileGather> tiles) = 0;
  // Writes words of the pool, 8-byte aligned.
  virtual absl::Status StoreWords(std::span<const WordStore> stores) = 0;
  // Copies out of device memory into the daemon's own.
  virtual absl::Status Read(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;
  // Copies the daemon's own memory into device memory that no reader sees yet. For bytes that came
  // out of Read: nothing is judged.
  virtual absl::Status Write(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;

  // Puts the keys of a lane together, in memory that is the device's own and goes with them.
  // RESOURCE_EXHAUSTED, and how many bytes it would take, where there is none.
  virtual absl::StatusOr<std::unique_ptr<LaneKeys>> LoadKeys(const kernels::LayerGeometry& geometry,
                                                             std::span<const KeyRun> runs) = 0;

  // Attention over lanes of a pool. The views hold device addresses; queries, outputs and
  // log-sum-exps are host memory. The items of a sequence follow one another, kv head by kv head,
  // and share their query and output. Returns the name of the code that ran. INTERNAL where a tile
  // is out of bounds.
  virtual absl::StatusOr<std::string_view> Attend(const kernels::AttendBatch& batch,
                                                  const PoolView& pool) = 0;
  // What Attend would read of the items, all of which have a selection rule. UNIMPLEMENTED where
  // the device cannot choose.
  virtual absl::StatusOr<std::string_view> Select(const kernels::AttendBatch& batch,
                                                  const PoolView& pool,
                                                  kernels::SelectionSink& sink) = 0;
};

// Whole granules.
inline std::uint64_t RoundUp(std::uint64_t bytes, std::uint64_t granularity) {
  return (bytes + granularity - 1) / granularity * granularity;
}

}  // namespace tessera::device
