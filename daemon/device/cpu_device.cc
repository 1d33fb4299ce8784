#include "daemon/device/cpu_device.h"

#include <cstdlib>
#include <cstring>

#include "daemon/base/strings.h"
#include "daemon/platform/memfd.h"

namespace tessera::device {

namespace {

// Scratch of one thread: kept while it is small, so that steady calls allocate nothing.
class Workspace {
 public:
  // Empty where there is no memory.
  std::span<std::byte> Take(std::size_t bytes) {
    if (capacity_ >= bytes) return {data_.get(), capacity_};
    const std::size_t rounded = (bytes + 63) / 64 * 64;
    capacity_ = 0;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
    if (data_ == nullptr) return {};
    capacity_ = rounded;
    return {data_.get(), capacity_};
  }
  void Return() {
    if (capacity_ <= kKept) return;
    data_ = nullptr;
    capacity_ = 0;
  }

 private:
  static constexpr std::size_t kKept = 16 << 20;
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  std::size_t capacity_ = 0;
};

void CopyRows(const std::byte* from, std::uint64_t stride, std::uint32_t rows,
              std::uint32_t row_bytes, std::byte* to) {
  if (stride == row_bytes) {
    std::memcpy(to, from, std::size_t{rows} * row_bytes);
    return;
  }
  for (std::uint32_t i = 0; i < rows; ++i) {
    std::memcpy(to + std::size_t{i} * row_bytes, from + i * stride, row_bytes);
  }
}

}  // namespace

CpuDevice::CpuDevice(const kernels::Implementation& kernels)
    : kernels_(kernels),
      description_{.name = "cpu",
                   .kernels = std::string(kernels::ImplementationName(kernels)),
                   .granularity = PageBytes()} {}

absl::StatusOr<std::unique_ptr<Memory>> CpuDevice::CreateWorkerMemory(std::string_view name,
                                                                      std::uint64_t bytes) {
  return CreateHostWorkerMemory(name, bytes);
}

absl::StatusOr<std::optional<UnusableRow>> CpuDevice::StoreRows(Place, kernels::ElementType type,
                                                                std::span<const RowRun> runs) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RowRun& run = runs[i];
    CopyRows(run.key, run.stride, run.rows, run.row_bytes, run.key_target);
    CopyRows(run.value, run.stride, run.rows, run.row_bytes, run.value_target);
    const std::size_t elements = run.row_bytes / kernels::ElementBytes(type);
    for (const bool of_value : {false, true}) {
      const std::int64_t at = kernels::FirstUnusable(
          kernels_, of_value ? run.value_target : run.key_target, run.rows * elements, type);
      if (at < 0) continue;
      return UnusableRow{.run = i,
                         .row = static_cast<std::uint32_t>(at / elements),
                         .of_value = of_value,
                         .channel = static_cast<std::uint32_t>(at % elements)};
    }
  }
  return std::nullopt;
}

absl::Status CpuDevice::StoreWords(std::span<const WordStore> stores) {
  for (const WordStore& store : stores) std::memcpy(store.address, &store.word, sizeof store.word);
  return absl::OkStatus();
}

absl::Status CpuDevice::Read(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::string_view> CpuDevice::Attend(const kernels::AttendBatch& batch,
                                                   const PoolView&) {
  thread_local Workspace workspace;
  const std::size_t needed = kernels::AttendWorkspaceBytes(batch);
  const std::span<std::byte> scratch = workspace.Take(needed);
  if (scratch.size() < needed) {
    return absl::ResourceExhaustedError(
        Concat("attention needs ", needed, " bytes of scratch, and there is no memory for them"));
  }
  kernels::InlineExecutor executor;
  const kernels::AttendResult result = kernels::Attend(kernels_, batch, scratch, executor);
  workspace.Return();
  if (result.status == kernels::AttendStatus::kOk) return result.implementation;
  return absl::InternalError(Concat("attention stopped with code ", static_cast<int>(result.status),
                                    " at item ", result.item));
}

}  // namespace tessera::device
