#include "tests/fakes/emulated_tile_ops.h"

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/tile_ops_rows.cuh"
#include "tests/fakes/gpu_emulator.h"

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

}  // namespace tessera::tests
