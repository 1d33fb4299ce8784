#include "tests/fakes/gpu/emulated_runtime.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "kernels/cuda/host/host_adapter.h"
#include "tests/fakes/gpu/emulated_tile_ops.h"

namespace tessera::tests {

namespace {

using namespace kernels::cuda;  // NOLINT: a test file

// Device memory comes from operator new with exactly the requested size, so that AddressSanitizer
// detects overruns. It starts as NaN.
constexpr std::align_val_t kAlignment{256};

class EmulatedRuntime final : public Runtime {
 public:
  explicit EmulatedRuntime(const EmulatedRuntimeOptions& options)
      : grid_(options.grid),
        left_(options.fails_after),
        memory_bytes_(options.memory_bytes),
        seed_(options.grid.seed) {}

  const char* implementation() const override { return "cuda_emulated"; }
  Error NewQueue(std::unique_ptr<Queue>* queue) override;
  Error Borrow(void*, std::unique_ptr<Queue>* queue) override { return NewQueue(queue); }
  Error Allocate(std::uint64_t bytes, void** address) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (memory_bytes_ != 0 && used_bytes_ + bytes > memory_bytes_) {
      return Error("the emulated device has no memory left", /*out_of_memory=*/true);
    }
    used_bytes_ += bytes;
    *address = operator new(bytes, kAlignment);
    std::memset(*address, 0xff, bytes);
    allocations_[*address] = bytes;
    return Error();
  }
  void Free(void* address) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto it = allocations_.find(address);
      if (it == allocations_.end()) return;  // null
      used_bytes_ -= it->second;
      allocations_.erase(it);
    }
    operator delete(address, kAlignment);
  }
  bool IsDeviceMemory(const void* address) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = allocations_.upper_bound(const_cast<void*>(address));
    if (after == allocations_.begin()) return false;
    const auto& [start, bytes] = *--after;
    return static_cast<const std::byte*>(address) < static_cast<const std::byte*>(start) + bytes;
  }
  Error Quiesce() override { return Error(); }

  // Counts a call. Fails it if it exceeds the limit.
  Error Enter() {
    if (left_.load() < 0) return Error();
    if (left_.fetch_sub(1) > 0) return Error();
    left_.store(0);
    return Error("the emulated device has failed");
  }
  EmulatedGrid grid() {
    EmulatedGrid grid = grid_;
    grid.seed = ++seed_;
    return grid;
  }

 private:
  const EmulatedGrid grid_;
  std::atomic<int> left_;
  const std::uint64_t memory_bytes_;
  std::atomic<std::uint64_t> seed_;
  std::mutex mutex_;
  std::map<void*, std::uint64_t> allocations_;
  std::uint64_t used_bytes_ = 0;
};

class EmulatedQueue final : public Queue {
 public:
  explicit EmulatedQueue(EmulatedRuntime& runtime) : runtime_(runtime) {}

  Error Copy(void* to, const void* from, std::uint64_t bytes) override {
    Error error = runtime_.Enter();
    if (error.ok() && bytes != 0) std::memmove(to, from, bytes);
    return error;
  }
  Error Attend(const AttendCall& call) override {
    if (const std::string_view problem = AttendCallProblem(call); !problem.empty()) {
      return Error("launching attention: " + std::string(problem));
    }
    Error error = runtime_.Enter();
    if (error.ok() && call.limits.batch != 0) EmulateAttend(call, runtime_.grid());
    return error;
  }
  Error Select(const AttendCall& call) override {
    if (const std::string_view problem = SelectCallProblem(call); !problem.empty()) {
      return Error("launching the selection: " + std::string(problem));
    }
    Error error = runtime_.Enter();
    if (error.ok() && call.limits.batch != 0) EmulateSelect(call, runtime_.grid());
    return error;
  }
  Error Append(const AppendParams& params) override {
    const std::string_view problem =
        RowsProblem(params.key, params.value, params.row_stride, params.row_bytes);
    if (!problem.empty()) return Error("launching the append: " + std::string(problem));
    Error error = runtime_.Enter();
    if (error.ok()) EmulateAppend(params, runtime_.grid().seed);
    return error;
  }
  Error StoreRows(const StoreRowsParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateStoreRows(params, runtime_.grid().seed);
    return error;
  }
  Error StoreWords(const StoreWordsParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateStoreWords(params, runtime_.grid().seed);
    return error;
  }
  Error EncodeTiles(const EncodeTilesParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateEncodeTiles(params, runtime_.grid().seed);
    return error;
  }
  Error DecodeTiles(const DecodeTilesParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateDecodeTiles(params, runtime_.grid().seed);
    return error;
  }
  Error KeysOfTiles(const KeysTilesParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateKeysOfTiles(params, runtime_.grid().seed);
    return error;
  }
  Error GatherTiles(const GatherTilesParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateGatherTiles(params, runtime_.grid().seed);
    return error;
  }
  Error MomentsOfRows(const MomentsTilesParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateMomentsOfRows(params, runtime_.grid().seed);
    return error;
  }
  Error Observe(const ObserveTilesParams& params) override {
    Error error = runtime_.Enter();
    if (error.ok() && params.count != 0) EmulateObserve(params, runtime_.grid().seed);
    return error;
  }
  Error Wait() override { return runtime_.Enter(); }
  Error Replay(const std::function<Error()>& work, std::uint32_t times, double* seconds) override {
    Error error = work();
    const auto begun = std::chrono::steady_clock::now();
    for (std::uint32_t i = 0; i < times && error.ok(); ++i) error = work();
    *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    return error;
  }

 private:
  EmulatedRuntime& runtime_;
};

Error EmulatedRuntime::NewQueue(std::unique_ptr<Queue>* queue) {
  *queue = std::make_unique<EmulatedQueue>(*this);
  return Error();
}

}  // namespace

std::unique_ptr<Runtime> NewEmulatedRuntime(const EmulatedRuntimeOptions& options) {
  return std::make_unique<EmulatedRuntime>(options);
}

std::unique_ptr<Runtime> EmulatedGpus::Open(int device, std::string* reason) {
  if (device >= 0 && device < devices) return NewEmulatedRuntime(options);
  *reason = "the emulated machine has no such device";
  return nullptr;
}

std::uint64_t EmulateHostBatch(const HostBatch& batch, const EmulatedGrid& grid) {
  return AttendOnDevice(*NewEmulatedRuntime({.grid = grid}), batch).fault;
}

}  // namespace tessera::tests
