#include "tests/fakes/gpu/emulated_tile_ops.h"

#include "kernels/cuda/encode/encode.cuh"
#include "kernels/cuda/encode/observe.cuh"
#include "kernels/cuda/encode/tile_keys.cuh"
#include "kernels/cuda/encode/tile_ops_rows.cuh"
#include "tests/fakes/gpu/gpu_emulator.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file

template <std::uint32_t kHeadDim>
void RunEncode(const EncodeTilesParams& params, std::uint64_t seed) {
  using Shape = EncodeShape<kHeadDim>;
  EmulateGpu({.blocks_x = params.count,
              .blocks_y = 2,
              .threads = Shape::kThreads,
              .shared_bytes = Shape::kSharedBytes,
              .seed = seed},
             [&] { EncodeTile<kHeadDim>(params); });
}

template <std::uint32_t kHeadDim>
void RunGather(const GatherTilesParams& params, std::uint64_t seed) {
  using Shape = EncodeShape<kHeadDim>;
  EmulateGpu({.blocks_x = params.count,
              .threads = Shape::kThreads,
              .shared_bytes = Shape::kSharedBytes,
              .seed = seed},
             [&] { GatherTileRows<kHeadDim>(params); });
}

template <std::uint32_t kHeadDim>
void RunObserve(ObserveTilesParams params, std::uint64_t seed) {
  const auto pieces = static_cast<std::uint32_t>(ObservePieces(params.max_keys));
  for (params.first_query = 0; params.first_query < params.max_queries;
       params.first_query += kObservedQueries) {
    EmulateGpu({.blocks_x = params.count,
                .blocks_y = pieces,
                .blocks_z = kObservedQueries / kTileColumns,
                .threads = kObserveThreads,
                .shared_bytes = kObserveSharedBytes,
                .seed = seed},
               [&] { ObserveProducts<kHeadDim>(params); });
    EmulateGpu({.blocks_x = params.count,
                .blocks_y = pieces,
                .threads = kObservedKeys,
                .shared_bytes = kObserveSumsSharedBytes,
                .seed = seed + 1},
               [&] { ObserveSums(params); });
  }
}

}  // namespace

void EmulateEncodeTiles(const EncodeTilesParams& params, std::uint64_t seed) {
  if (params.head_dim == 64) RunEncode<64>(params, seed);
  if (params.head_dim == 128) RunEncode<128>(params, seed);
  if (params.head_dim == 256) RunEncode<256>(params, seed);
}

void EmulateDecodeTiles(const DecodeTilesParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = params.count, .blocks_y = 2, .threads = 64, .seed = seed},
             [&] { DecodeTile(params); });
}

void EmulateKeysOfTiles(const KeysTilesParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = params.count,
              .threads = kKeysThreads,
              .shared_bytes = KeysSharedBytes(params.head_dim),
              .seed = seed},
             [&] { KeysOfTile(params); });
}

void EmulateGatherTiles(const GatherTilesParams& params, std::uint64_t seed) {
  if (params.head_dim == 64) RunGather<64>(params, seed);
  if (params.head_dim == 128) RunGather<128>(params, seed);
  if (params.head_dim == 256) RunGather<256>(params, seed);
}

void EmulateMomentsOfRows(const MomentsTilesParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = params.count,
              .blocks_y = MomentsSquares(params.head_dim),
              .threads = kMomentsThreads,
              .shared_bytes = kMomentsSharedBytes,
              .seed = seed},
             [&] { SumMoments(params); });
}

void EmulateObserve(const ObserveTilesParams& params, std::uint64_t seed) {
  if (params.form.head_dim == 64) RunObserve<64>(params, seed);
  if (params.form.head_dim == 128) RunObserve<128>(params, seed);
  if (params.form.head_dim == 256) RunObserve<256>(params, seed);
}

}  // namespace tessera::tests
