// Launch parameters of the tile operations: arrays of jobs in device memory, and plain structs that
// are passed by value.
//
// All addresses in jobs are device addresses. Jobs of one launch may share sources and strategies.
// No job may read or write what another job writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/format/element.h"
#include "kernels/format/part.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels::cuda {

// How the rows of a tile are stored. Rotations are as in RotationView, 16-byte aligned; 0:
// identity.
struct DeviceStrategy {
  TileShape shape;
  TileLayout layout;  // layout of `shape`
  ElementType rotation_type = ElementType::kBf16;
  std::uint64_t key_rotation = 0;
  std::uint64_t value_rotation = 0;
  // Of planes, and the keys' mean of signs. Means are as in RotationView, 16-byte aligned; error
  // limits as in EncodeJob.
  std::uint64_t key_mean = 0;
  std::uint64_t value_mean = 0;
  float key_error_limit = std::numeric_limits<float>::infinity();
  float value_error_limit = std::numeric_limits<float>::infinity();
};

// Rows to be encoded into one tile. Row r is at key + r * stride; all three are multiples of 16.
struct EncodeTileJob {
  std::uint64_t key = 0;
  std::uint64_t value = 0;
  std::uint64_t stride = 0;     // bytes
  std::uint64_t weights = 0;    // float[rows]; 0: all 1
  std::uint64_t positions = 0;  // uint32[rows]; 0: 0, 1, 2, ...
  std::uint64_t tile = 0;       // layout.bytes, all written; a multiple of 16
  // layout.summary_bytes, all written; a multiple of kSummaryAlignment
  std::uint64_t summaries = 0;
  std::uint32_t rows = 0;      // 1 .. 32
  std::uint32_t strategy = 0;  // index
};
static_assert(sizeof(EncodeTileJob) == 64);

struct DecodeTileJob {
  std::uint64_t tile = 0;
  std::uint64_t keys = 0;    // float[rows][PaddedChannels]
  std::uint64_t values = 0;  // same layout
  std::uint32_t rows = 0;    // 1 .. 32
  std::uint32_t strategy = 0;
};
static_assert(sizeof(DecodeTileJob) == 32);

// K rows of a tile to be restored: rotated back and stored as elements of the launch's type. All
// addresses are multiples of 16.
struct KeysTileJob {
  std::uint64_t tile = 0;
  std::uint64_t keys = 0;  // [rows][head_dim], one after another
  std::uint32_t rows = 0;  // 1 .. 32
  std::uint32_t strategy = 0;
};
static_assert(sizeof(KeysTileJob) == 24);

// A new tile gathered from rows of other tiles. The shapes may differ only in weights and
// positions, and the new tile may keep planes without their crumbs. It must not be one of the
// sources.
struct GatherTileJob {
  std::uint64_t tile = 0;
  std::uint64_t summaries = 0;
  std::uint32_t first_row = 0;  // index in the launch's list of rows
  std::uint32_t row_count = 0;  // 1 .. 32
  std::uint32_t from = 0;       // strategy index of all sources
  std::uint32_t to = 0;
};
static_assert(sizeof(GatherTileJob) == 32);

struct MomentsTileJob {
  std::uint64_t rows = 0;    // a multiple of 16, like `stride`
  std::uint64_t stride = 0;  // bytes
  std::uint64_t sums = 0;    // double[head_dim][head_dim]
  std::uint64_t row_count = 0;
};
static_assert(sizeof(MomentsTileJob) == 32);

// Keys and the queries that observe them. ObserveJob defines the computation.
struct ObserveTileJob {
  std::uint64_t keys = 0;  // a multiple of 16, like `key_stride`, `queries` and `query_stride`
  std::uint64_t key_stride = 0;
  std::uint64_t key_count = 0;
  std::uint64_t queries = 0;
  std::uint64_t query_stride = 0;
  std::uint64_t visible_begin = 0;  // uint64[query_count]; 0: every range begins at 0
  std::uint64_t visible_end = 0;    // uint64[query_count], each at most key_count
  std::uint64_t log2_weights = 0;   // float[key_count]; 0: every key is one token
  std::uint64_t sums = 0;           // double[key_count]
  std::uint64_t scratch_at = 0;  // offset into the launch's scratch, in floats; TileCalls sets it
  std::uint32_t query_count = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(ObserveTileJob) == 88);

// Settings that all observations of a launch share.
struct ObserveForm {
  std::uint32_t head_dim;
  ElementType type;  // type of keys and queries
  float scale;
  float logit_softcap;  // 0: none
  bool logits;
};

// Result word of an encode: kNoUnusableJob, or the lowest index of a job with a rotated row that is
// not finite or, in planes, whose error is over the limit. The tile of such a job holds anything;
// all other tiles are complete.
inline constexpr std::uint64_t kNoUnusableJob = ~std::uint64_t{0};

struct EncodeTilesParams {
  const DeviceStrategy* strategies;  // all of this head_dim
  const EncodeTileJob* jobs;
  std::uint64_t* unusable;
  std::uint32_t count;
  std::uint32_t head_dim;
  ElementType type;  // type of all rows
};

struct DecodeTilesParams {
  const DeviceStrategy* strategies;
  const DecodeTileJob* jobs;
  std::uint32_t count;
};

struct KeysTilesParams {
  const DeviceStrategy* strategies;  // all of this head_dim
  const KeysTileJob* jobs;
  std::uint32_t count;
  std::uint32_t head_dim;
  ElementType type;  // type of all keys
};

struct GatherTilesParams {
  const DeviceStrategy* strategies;  // all of this head_dim
  const GatherTileJob* jobs;
  const GatherRow* rows;  // tiles as device addresses
  std::uint32_t count;
  std::uint32_t head_dim;
};

struct MomentsTilesParams {
  const MomentsTileJob* jobs;
  std::uint32_t count;
  std::uint32_t head_dim;
  ElementType type;
};

struct ObserveTilesParams {
  const ObserveTileJob* jobs;
  float* scratch;  // ObserveScratchFloats for every job
  std::uint64_t max_keys;
  std::uint32_t max_queries;
  std::uint32_t count;
  std::uint32_t first_query;  // set by the launch
  ObserveForm form;
};

// Error bound of a rotated element, as a share of sum_d |R_cd x_d|. By FMA, 256 additions round by
// 2^-24 each. Tensor cores add 16 exact products at a time and truncate. Identity rotations are
// exact.
inline constexpr double kRotationError = 0x1p-16;

}  // namespace tessera::kernels::cuda
