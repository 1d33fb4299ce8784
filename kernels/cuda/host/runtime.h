// What the host does with a GPU, behind an interface: device memory, streams, copies and the
// launches of launch.h and tile_ops_launch.h. The daemon's CUDA device, the worker's step, the tile
// operations' host calls and the host adapter are written on it, so they compile without CUDA and
// run on the emulated machine in tests.
//
// Every call answers an Error, empty where all was well. After a failure, but for lack of memory,
// the device is of no more use: CUDA reports what a kernel did wrong at some later call, and its
// memory cannot be trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/cuda/common/params.h"
#include "kernels/cuda/encode/tile_ops_params.h"

namespace tessera::kernels::cuda {

class [[nodiscard]] Error {
 public:
  Error() = default;
  explicit Error(std::string text, bool out_of_memory = false)
      : text_(std::move(text)), out_of_memory_(out_of_memory) {}
  bool ok() const { return text_.empty(); }
  const std::string& text() const { return text_; }
  // The one failure that leaves the device as good as it was.
  bool out_of_memory() const { return out_of_memory_; }

 private:
  std::string text_;
  bool out_of_memory_ = false;
};

// One stream. Calls are carried out in order, and later than they return: `to` of a copy out of the
// device holds its bytes after Wait. Used by one thread at a time, whichever it is.
class Queue {
 public:
  virtual ~Queue() = default;
  // Between host and device, either way, or within one of them: addresses tell which. Host memory
  // that is read may be reused at once.
  virtual Error Copy(void* to, const void* from, std::uint64_t bytes) = 0;
  virtual Error Attend(const AttendCall& call) = 0;
  // The choice of blocks alone, as Attend makes it; SelectionReader says where it is.
  virtual Error Select(const AttendCall& call) = 0;
  virtual Error Append(const AppendParams& params) = 0;
  virtual Error StoreRows(const StoreRowsParams& params) = 0;
  virtual Error StoreWords(const StoreWordsParams& params) = 0;
  // Jobs are not looked at: TileCalls has the checks.
  virtual Error EncodeTiles(const EncodeTilesParams& params) = 0;
  virtual Error DecodeTiles(const DecodeTilesParams& params) = 0;
  virtual Error KeysOfTiles(const KeysTilesParams& params) = 0;
  virtual Error GatherTiles(const GatherTilesParams& params) = 0;
  virtual Error MomentsOfRows(const MomentsTilesParams& params) = 0;
  virtual Error Observe(const ObserveTilesParams& params) = 0;
  virtual Error Wait() = 0;
  // What `work` puts on this queue, recorded as a graph that is carried out `times` times with no
  // host between, and how long all of them took on the device together. `work` is called twice:
  // what it does a first time cannot be recorded. It puts launches on this queue and nothing else.
  virtual Error Replay(const std::function<Error()>& work, std::uint32_t times,
                       double* seconds) = 0;
};

// One device, prepared for the kernels. Thread-safe. Outlives its queues and buffers.
class Runtime {
 public:
  virtual ~Runtime() = default;
  // The code that runs, as answers name it.
  virtual const char* implementation() const = 0;
  virtual Error NewQueue(std::unique_ptr<Queue>* queue) = 0;
  // On a stream of the caller's (a cudaStream_t), which outlives it.
  virtual Error Borrow(void* stream, std::unique_ptr<Queue>* queue) = 0;
  // Addresses are multiples of 256.
  virtual Error Allocate(std::uint64_t bytes, void** address) = 0;
  // Whether kernels can follow the address; host memory that no driver knows of is not theirs.
  virtual bool IsDeviceMemory(const void* address) = 0;
  virtual void Free(void* address) = 0;
  // Returns when nothing that this process has put on the device runs any more.
  virtual Error Quiesce() = 0;
};

// The device's Runtime, or null and why not: no toolkit in this build, no driver, no such device, a
// device that the kernels do not fit.
class RuntimeSource {
 public:
  virtual ~RuntimeSource() = default;
  virtual std::unique_ptr<Runtime> Open(int device, std::string* reason) = 0;
};

// The machine's own GPUs.
RuntimeSource& SystemGpus();

// Device memory that its owner uses again and again: grows, never shrinks, keeps nothing while it
// grows.
class Scratch {
 public:
  explicit Scratch(Runtime& runtime) : runtime_(&runtime) {}
  Scratch(Scratch&& other) noexcept
      : runtime_(other.runtime_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() { runtime_->Free(data_); }

  // Nothing that uses the old memory may be under way where it grows.
  Error Grow(std::uint64_t bytes) {
    if (bytes <= bytes_) return Error();
    runtime_->Free(std::exchange(data_, nullptr));
    bytes_ = 0;
    const std::uint64_t rounded = (bytes + kGranule - 1) / kGranule * kGranule;
    if (Error error = runtime_->Allocate(rounded, &data_); !error.ok()) return error;
    bytes_ = rounded;
    return Error();
  }
  template <class T = std::byte>
  T* at(std::uint64_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset);
  }
  std::uint64_t bytes() const { return bytes_; }

 private:
  static constexpr std::uint64_t kGranule = std::uint64_t{64} << 10;
  Runtime* runtime_;
  void* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace tessera::kernels::cuda
