// A CUDA device: KV in GPU memory, computed by kernels/cuda. Workers map the memory by file
// descriptor, or by CUDA IPC if the GPU cannot export descriptors.
//
//   rows of a request ── host buffer ── copy ──▶ scratch ──┐
//   rows of tails and staging ─────────────────────────────┴─ StoreRows ─▶ tiles ─ Encode ─▶ tiles
//   queries ── copy ──▶ scratch ── Attend ──▶ scratch ── copy ──▶ outputs
//                               ── Select ──▶ scratch ── copy ──▶ ranges of blocks
//   tiles ── LoadKeys ──▶ keys of a lane, queries ── copy ──▶ scratch ── Look ── copy ──▶ sums
//
// Each call borrows a free Bench (a stream and its scratch). So calls of several threads overlap,
// and none waits for another call's kernels.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/device/device.h"
#include "daemon/platform/cuda_calls.h"
#include "daemon/platform/cuda_memory.h"
#include "kernels/cuda/host/runtime.h"

namespace tessera::device {

class CudaDevice final : public Device {
 public:
  struct Options {
    CudaCalls* calls = nullptr;  // must outlive the device
    kernels::cuda::RuntimeSource* gpus = nullptr;
    int ordinal = 0;
    // Called once, when the device fails, on the thread whose call failed.
    std::function<void(const absl::Status& why)> on_failure;
  };
  // Returns FAILED_PRECONDITION with a reason if the GPU cannot be used.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Create(Options options);
  ~CudaDevice() override;

  const Description& description() const override { return description_; }
  absl::Status health() const override;
  MemorySource& pool_memory() override { return *pool_memory_; }
  absl::StatusOr<std::unique_ptr<Memory>> CreateWorkerMemory(std::string_view name,
                                                             std::uint64_t bytes) override;
  absl::StatusOr<std::optional<UnusableRow>> StoreRows(Place source, kernels::ElementType type,
                                                       std::span<const RowRun> runs) override;
  absl::StatusOr<std::optional<std::size_t>> Encode(std::span<const TileStrategy> strategies,
                                                    kernels::ElementType type,
                                                    std::span<const TileEncode> tiles) override;
  absl::Status Gather(const kernels::TileShape& from, const kernels::TileShape& to,
                      std::span<const TileGather> tiles) override;
  absl::Status StoreWords(std::span<const WordStore> stores) override;
  absl::Status Read(std::byte* to, const std::byte* from, std::uint64_t bytes) override;
  absl::Status Write(std::byte* to, const std::byte* from, std::uint64_t bytes) override;
  absl::StatusOr<std::unique_ptr<LaneKeys>> LoadKeys(const kernels::LayerGeometry& geometry,
                                                     std::span<const KeyRun> runs) override;
  absl::StatusOr<std::string_view> Attend(const kernels::AttendBatch& batch,
                                          const PoolView& pool) override;
  absl::StatusOr<std::string_view> Select(const kernels::AttendBatch& batch, const PoolView& pool,
                                          kernels::SelectionSink& sink) override;
  std::uint64_t memory_bytes() const { return probed_.info.memory_bytes; }

 private:
  class AttendLayout;
  class Bench;
  class Keys;
  class Taken;

  CudaDevice(Options options, ProbedCudaDevice probed);
  absl::StatusOr<Taken> AcquireBench();
  absl::StatusOr<kernels::cuda::AttendCall> Upload(const kernels::AttendBatch& batch,
                                                   const PoolView& pool, AttendLayout& layout,
                                                   Bench& bench);
  // Returns UNIMPLEMENTED if the batch needs a feature that this device lacks.
  absl::Status CheckServed(const kernels::AttendBatch& batch) const;
  // Marks the device as failed, unless the error is only lack of memory.
  absl::Status Answer(const kernels::cuda::Error& error);
  absl::Status Copy(std::byte* to, const std::byte* from, std::uint64_t bytes);
  absl::Status StoreSome(Bench& bench, Place source, kernels::ElementType type,
                         std::span<const RowRun> runs, std::optional<UnusableRow>* unusable);
  absl::StatusOr<UnusableRow> LocateUnusable(Bench& bench, kernels::ElementType type,
                                             std::span<const RowRun> runs, std::uint64_t found);

  const Options options_;
  const ProbedCudaDevice probed_;
  Description description_;
  std::unique_ptr<kernels::cuda::Runtime> runtime_;
  std::unique_ptr<MemorySource> pool_memory_;

  mutable Mutex mutex_;
  absl::Status failed_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Bench>> free_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::device
