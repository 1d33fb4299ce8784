#include <cuda_runtime.h>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/encode/tile_ops_launch.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::kernels::cuda {
namespace {

Error Answer(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Error();
  // Clears the error: it is reported here and must not surface at a later launch.
  (void)cudaGetLastError();
  return Error(
      std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")",
      error == cudaErrorMemoryAllocation);
}

// Owns a CUDA handle and destroys it.
template <class T, cudaError_t (*Destroy)(T)>
struct Owned {
  T handle = nullptr;
  ~Owned() {
    if (handle != nullptr) (void)Destroy(handle);
  }
};

class Stream final : public Queue {
 public:
  Stream(int device, const DeviceLimits& limits, cudaStream_t stream, bool owned)
      : device_(device), limits_(limits), stream_(stream), owned_(owned) {}
  ~Stream() override {
    if (owned_) (void)cudaStreamDestroy(stream_);
  }

  Error Copy(void* to, const void* from, std::uint64_t bytes) override {
    if (bytes == 0) return Error();
    return On([&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_); },
              "copying");
  }
  Error Attend(const AttendCall& call) override {
    return On([&] { return LaunchAttend(limits_, call, stream_); }, "launching attention");
  }
  Error Select(const AttendCall& call) override {
    return On([&] { return LaunchSelect(limits_, call, stream_); }, "launching selection");
  }
  Error Append(const AppendParams& params) override {
    return On([&] { return LaunchAppend(params, stream_); }, "launching append");
  }
  Error StoreRows(const StoreRowsParams& params) override {
    return On([&] { return LaunchStoreRows(params, stream_); }, "launching store rows");
  }
  Error StoreWords(const StoreWordsParams& params) override {
    return On([&] { return LaunchStoreWords(params, stream_); }, "launching store words");
  }
  Error EncodeTiles(const EncodeTilesParams& params) override {
    return On([&] { return LaunchEncodeTiles(params, stream_); }, "launching encode");
  }
  Error DecodeTiles(const DecodeTilesParams& params) override {
    return On([&] { return LaunchDecodeTiles(params, stream_); }, "launching decode");
  }
  Error KeysOfTiles(const KeysTilesParams& params) override {
    return On([&] { return LaunchKeysOfTiles(params, stream_); }, "launching keys");
  }
  Error GatherTiles(const GatherTilesParams& params) override {
    return On([&] { return LaunchGatherTiles(params, stream_); }, "launching gather");
  }
  Error MomentsOfRows(const MomentsTilesParams& params) override {
    return On([&] { return LaunchMomentsTiles(params, stream_); }, "launching moments");
  }
  Error Observe(const ObserveTilesParams& params) override {
    return On([&] { return LaunchObserveTiles(params, stream_); }, "launching observe");
  }
  Error Wait() override {
    return On([&] { return cudaStreamSynchronize(stream_); }, "waiting for the device");
  }
  Error Replay(const std::function<Error()>& work, std::uint32_t times, double* seconds) override {
    Owned<cudaGraph_t, cudaGraphDestroy> graph;
    Owned<cudaGraphExec_t, cudaGraphExecDestroy> ready;
    if (Error error = Record(work, &graph.handle); !error.ok()) return error;
    Owned<cudaEvent_t, cudaEventDestroy> begun, ended;
    float milliseconds = 0;
    const auto replay = [&] {
      cudaError_t error = cudaGraphInstantiate(&ready.handle, graph.handle, 0);
      // The first launch is not timed: it uploads the graph to the device.
      if (error == cudaSuccess) error = cudaGraphLaunch(ready.handle, stream_);
      if (error == cudaSuccess) error = cudaEventCreate(&begun.handle);
      if (error == cudaSuccess) error = cudaEventCreate(&ended.handle);
      if (error == cudaSuccess) error = cudaEventRecord(begun.handle, stream_);
      for (std::uint32_t i = 0; i < times && error == cudaSuccess; ++i) {
        error = cudaGraphLaunch(ready.handle, stream_);
      }
      if (error == cudaSuccess) error = cudaEventRecord(ended.handle, stream_);
      if (error == cudaSuccess) error = cudaEventSynchronize(ended.handle);
      if (error != cudaSuccess) return error;
      return cudaEventElapsedTime(&milliseconds, begun.handle, ended.handle);
    };
    Error error = On(replay, "replaying a graph");
    *seconds = milliseconds * 1e-3;
    return error;
  }

 private:
  Error Record(const std::function<Error()>& work, cudaGraph_t* graph) {
    const auto begin = [&] {
      return cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal);
    };
    if (Error first = work(); !first.ok()) return first;
    if (Error begun = On(begin, "recording a graph"); !begun.ok()) return begun;
    const Error recorded = work();
    // End the capture even if the work failed, so that the stream stops recording.
    const Error ended =
        On([&] { return cudaStreamEndCapture(stream_, graph); }, "recording a graph");
    return recorded.ok() ? ended : recorded;
  }
  // The calling thread may have used another device last.
  template <class Call>
  Error On(Call call, const char* what) {
    const cudaError_t error = cudaSetDevice(device_);
    return Answer(error == cudaSuccess ? call() : error, what);
  }

  const int device_;
  const DeviceLimits limits_;
  const cudaStream_t stream_;
  const bool owned_;
};

class Gpu final : public Runtime {
 public:
  Gpu(int device, const DeviceLimits& limits) : device_(device), limits_(limits) {}

  const char* implementation() const override { return "cuda"; }

  Error NewQueue(std::unique_ptr<Queue>* queue) override {
    cudaStream_t stream = nullptr;
    cudaError_t error = cudaSetDevice(device_);
    if (error == cudaSuccess) {
      error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    }
    if (error == cudaSuccess) *queue = std::make_unique<Stream>(device_, limits_, stream, true);
    return Answer(error, "creating a stream");
  }
  Error Borrow(void* stream, std::unique_ptr<Queue>* queue) override {
    *queue = std::make_unique<Stream>(device_, limits_, static_cast<cudaStream_t>(stream), false);
    return Error();
  }
  Error Allocate(std::uint64_t bytes, void** address) override {
    cudaError_t error = cudaSetDevice(device_);
    if (error == cudaSuccess) error = cudaMalloc(address, bytes);
    return Answer(error, "allocating device memory");
  }
  bool IsDeviceMemory(const void* address) override {
    cudaPointerAttributes attributes = {};
    const cudaError_t error = cudaPointerGetAttributes(&attributes, address);
    (void)cudaGetLastError();
    return error == cudaSuccess &&
           (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged);
  }
  void Free(void* address) override {
    if (address != nullptr && cudaSetDevice(device_) == cudaSuccess) (void)cudaFree(address);
  }
  Error Quiesce() override {
    cudaError_t error = cudaSetDevice(device_);
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    return Answer(error, "waiting for the device");
  }

 private:
  const int device_;
  const DeviceLimits limits_;
};

class Gpus final : public RuntimeSource {
 public:
  std::unique_ptr<Runtime> Open(int device, std::string* reason) override {
    DeviceLimits limits;
    const Error error = Answer(PrepareDevice(device, &limits), "opening the CUDA device");
    if (error.ok()) return std::make_unique<Gpu>(device, limits);
    *reason = error.text();
    return nullptr;
  }
};

}  // namespace

RuntimeSource& SystemGpus() {
  static Gpus gpus;
  return gpus;
}

}  // namespace tessera::kernels::cuda
