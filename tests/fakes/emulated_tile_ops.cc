#include "tests/fakes/emulated_tile_ops.h"

#include <utility>

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

class EmulatedTileQueue final : public TileQueue {
 public:
  EmulatedTileQueue(std::unique_ptr<Queue> queue, std::uint64_t seed)
      : queue_(std::move(queue)), seed_(seed) {}

  Queue& queue() override { return *queue_; }
  Error Encode(const EncodeTilesParams& params) override {
    if (params.head_dim == 64) RunEncode<64>(params, ++seed_);
    if (params.head_dim == 128) RunEncode<128>(params, ++seed_);
    if (params.head_dim == 256) RunEncode<256>(params, ++seed_);
    return Error();
  }
  Error Decode(const DecodeTilesParams& params) override {
    EmulateGpu({.blocks_x = params.count, .blocks_y = 2, .threads = 64, .seed = ++seed_},
               [&] { DecodeTile(params); });
    return Error();
  }
  Error Gather(const GatherTilesParams& params) override {
    if (params.head_dim == 64) RunGather<64>(params, ++seed_);
    if (params.head_dim == 128) RunGather<128>(params, ++seed_);
    if (params.head_dim == 256) RunGather<256>(params, ++seed_);
    return Error();
  }
  Error Moments(const MomentsTilesParams& params) override {
    EmulateGpu({.blocks_x = params.count,
                .blocks_y = MomentsSquares(params.head_dim),
                .threads = kMomentsThreads,
                .shared_bytes = kMomentsSharedBytes,
                .seed = ++seed_},
               [&] { SumMoments(params); });
    return Error();
  }

 private:
  const std::unique_ptr<Queue> queue_;
  std::uint64_t seed_;
};

}  // namespace

std::unique_ptr<TileQueue> NewEmulatedTileQueue(Runtime& runtime, std::uint64_t seed) {
  std::unique_ptr<Queue> queue;
  if (!runtime.NewQueue(&queue).ok()) return nullptr;
  return std::make_unique<EmulatedTileQueue>(std::move(queue), seed);
}

}  // namespace tessera::tests
