// The host's interface to a GPU: device memory, streams, copies, and the launches of launch.h and
// tile_ops_launch.h. The daemon's CUDA device, the worker's step, TileCalls and the host adapter
// use it, so they compile without CUDA and run on the emulated machine in tests.
//
// Every call returns an Error, which is empty on success. After any failure except lack of memory,
// the device is unusable: CUDA reports a kernel's error at some later call, and the device's memory
// cannot be trusted.
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
  // Lack of memory is the only failure after which the device is still usable.
  bool out_of_memory() const { return out_of_memory_; }

 private:
  std::string text_;
  bool out_of_memory_ = false;
};

// One stream. Calls run in order and asynchronously: the target of a copy out of the device holds
// its bytes after Wait. One thread at a time may use a queue, but it may be a different one each
// time.
class Queue {
 public:
  virtual ~Queue() = default;
  // Copies between host and device in either direction, or within one of them; the addresses
  // decide. Source memory on the host may be reused at once.
  virtual Error Copy(void* to, const void* from, std::uint64_t bytes) = 0;
  virtual Error Attend(const AttendCall& call) = 0;
  // Selects blocks exactly as Attend does. SelectionReader reads the result.
  virtual Error Select(const AttendCall& call) = 0;
  virtual Error Append(const AppendParams& params) = 0;
  virtual Error StoreRows(const StoreRowsParams& params) = 0;
  virtual Error StoreWords(const StoreWordsParams& params) = 0;
  // Jobs are not checked here; TileCalls checks them.
  virtual Error EncodeTiles(const EncodeTilesParams& params) = 0;
  virtual Error DecodeTiles(const DecodeTilesParams& params) = 0;
  virtual Error KeysOfTiles(const KeysTilesParams& params) = 0;
  virtual Error GatherTiles(const GatherTilesParams& params) = 0;
  virtual Error MomentsOfRows(const MomentsTilesParams& params) = 0;
  virtual Error Observe(const ObserveTilesParams& params) = 0;
  virtual Error Wait() = 0;
  // Records the launches of `work` as a graph and runs it `times` times without host involvement.
  // Returns how long all runs took together on the device. `work` is called twice, because
  // first-time initialisation cannot be recorded. It must put launches on this queue and do nothing
  // else.
  virtual Error Replay(const std::function<Error()>& work, std::uint32_t times,
                       double* seconds) = 0;
};

// One device, prepared for the kernels. Thread-safe. Must outlive its queues and buffers.
class Runtime {
 public:
  virtual ~Runtime() = default;
  // Name of the implementation, as responses report it.
  virtual const char* implementation() const = 0;
  virtual Error NewQueue(std::unique_ptr<Queue>* queue) = 0;
  // Wraps a stream of the caller's (a cudaStream_t), which must outlive the queue.
  virtual Error Borrow(void* stream, std::unique_ptr<Queue>* queue) = 0;
  // Addresses are multiples of 256.
  virtual Error Allocate(std::uint64_t bytes, void** address) = 0;
  // Returns true if kernels can follow the address. Host memory that is not registered with the
  // driver is not device memory.
  virtual bool IsDeviceMemory(const void* address) = 0;
  virtual void Free(void* address) = 0;
  // Returns when nothing that this process submitted to the device is running any more.
  virtual Error Quiesce() = 0;
};

// Opens the device's Runtime. Returns null and a reason if this build has no CUDA, or there is no
// driver, no such device, or the kernels do not fit the device.
class RuntimeSource {
 public:
  virtual ~RuntimeSource() = default;
  virtual std::unique_ptr<Runtime> Open(int device, std::string* reason) = 0;
};

// The GPUs of this machine.
RuntimeSource& SystemGpus();

// Reusable device memory. It grows, never shrinks, and loses its contents when it grows.
class Scratch {
 public:
  explicit Scratch(Runtime& runtime) : runtime_(&runtime) {}
  Scratch(Scratch&& other) noexcept
      : runtime_(other.runtime_),
        data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)) {}
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() { runtime_->Free(data_); }

  // Nothing that uses the old memory may be in flight when it grows.
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
