#include <cuda_runtime.h>

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/tile_ops.h"
#include "kernels/cuda/tile_ops_launch.h"
#include "kernels/cuda/tile_ops_rows.cuh"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint32_t kDecodeThreads = 256;
// Blocks per multiprocessor that the encodes promise to fit: 128 registers for 256 threads.
constexpr std::uint32_t kBlocks = 2;

template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(EncodeShape<kHeadDim>::kThreads, kBlocks)
    EncodeTilesKernel(const __grid_constant__ EncodeTilesParams params) {
  EncodeTile<kHeadDim>(params);
}
template <std::uint32_t kHeadDim>
__global__ void __launch_bounds__(EncodeShape<kHeadDim>::kThreads, kBlocks)
    GatherTilesKernel(const __grid_constant__ GatherTilesParams params) {
  GatherTileRows<kHeadDim>(params);
}
__global__ void __launch_bounds__(kDecodeThreads)
    DecodeTilesKernel(const __grid_constant__ DecodeTilesParams params) {
  DecodeTile(params);
}
__global__ void __launch_bounds__(kMomentsThreads)
    MomentsTilesKernel(const __grid_constant__ MomentsTilesParams params) {
  SumMoments(params);
}

template <std::uint32_t kHeadDim>
cudaError_t LaunchEncodeOf(const EncodeTilesParams& params, cudaStream_t stream) {
  using Shape = EncodeShape<kHeadDim>;
  EncodeTilesKernel<kHeadDim>
      <<<dim3(params.count, 2), Shape::kThreads, Shape::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

template <std::uint32_t kHeadDim>
cudaError_t LaunchGatherOf(const GatherTilesParams& params, cudaStream_t stream) {
  using Shape = EncodeShape<kHeadDim>;
  GatherTilesKernel<kHeadDim>
      <<<params.count, Shape::kThreads, Shape::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

// A stream of its own, and a Queue that borrows it for copies and waits.
class TileStream final : public TileQueue {
 public:
  TileStream(int device, cudaStream_t stream) : device_(device), stream_(stream) {}
  ~TileStream() override {
    queue_.reset();
    (void)cudaStreamDestroy(stream_);
  }
  Error Borrow(Runtime& runtime) { return runtime.Borrow(stream_, &queue_); }

  Queue& queue() override { return *queue_; }
  Error Encode(const EncodeTilesParams& params) override {
    return On([&] { return LaunchEncodeTiles(params, stream_); }, "launching the encode");
  }
  Error Decode(const DecodeTilesParams& params) override {
    return On([&] { return LaunchDecodeTiles(params, stream_); }, "launching the decode");
  }
  Error Gather(const GatherTilesParams& params) override {
    return On([&] { return LaunchGatherTiles(params, stream_); }, "launching the gather");
  }
  Error Moments(const MomentsTilesParams& params) override {
    return On([&] { return LaunchMomentsTiles(params, stream_); }, "launching the moments");
  }

  static Error Answer(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return Error();
    (void)cudaGetLastError();  // reported here; must not surface at somebody else's launch
    return Error(
        std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")",
        error == cudaErrorMemoryAllocation);
  }

 private:
  // The calling thread may have had another device last.
  template <class Call>
  Error On(Call call, const char* what) {
    const cudaError_t error = cudaSetDevice(device_);
    return Answer(error == cudaSuccess ? call() : error, what);
  }

  const int device_;
  const cudaStream_t stream_;
  std::unique_ptr<Queue> queue_;
};

}  // namespace

cudaError_t LaunchEncodeTiles(const EncodeTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.strategies == nullptr || params.jobs == nullptr || params.unusable == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (params.head_dim == 64) return LaunchEncodeOf<64>(params, stream);
  if (params.head_dim == 128) return LaunchEncodeOf<128>(params, stream);
  if (params.head_dim == 256) return LaunchEncodeOf<256>(params, stream);
  return cudaErrorInvalidValue;
}

cudaError_t LaunchDecodeTiles(const DecodeTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.strategies == nullptr || params.jobs == nullptr) return cudaErrorInvalidValue;
  DecodeTilesKernel<<<dim3(params.count, 2), kDecodeThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchGatherTiles(const GatherTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.strategies == nullptr || params.jobs == nullptr || params.rows == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (params.head_dim == 64) return LaunchGatherOf<64>(params, stream);
  if (params.head_dim == 128) return LaunchGatherOf<128>(params, stream);
  if (params.head_dim == 256) return LaunchGatherOf<256>(params, stream);
  return cudaErrorInvalidValue;
}

cudaError_t LaunchMomentsTiles(const MomentsTilesParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  if (params.jobs == nullptr || !IsHeadDim(params.head_dim)) return cudaErrorInvalidValue;
  const dim3 grid(params.count, MomentsSquares(params.head_dim));
  MomentsTilesKernel<<<grid, kMomentsThreads, kMomentsSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

Error NewTileQueue(Runtime& runtime, int device, std::unique_ptr<TileQueue>* queue) {
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return TileStream::Answer(error, "creating a stream");
  auto made = std::make_unique<TileStream>(device, stream);
  if (Error refused = made->Borrow(runtime); !refused.ok()) return refused;
  *queue = std::move(made);
  return Error();
}

}  // namespace tessera::kernels::cuda
