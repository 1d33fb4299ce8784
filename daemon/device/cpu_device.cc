#include "daemon/device/cpu_device.h"

#include <cstdlib>
#include <cstring>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/platform/memfd.h"

namespace tessera::device {

namespace {

// Scratch of the calling thread; grows to the largest batch it has seen.
std::span<std::byte> Workspace(std::size_t bytes) {
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  thread_local std::unique_ptr<std::byte[], Free> data;
  thread_local std::size_t capacity = 0;
  if (capacity < bytes) {
    capacity = (bytes + 63) / 64 * 64;
    data.reset(static_cast<std::byte*>(std::aligned_alloc(64, capacity)));
    TESSERA_CHECK(data != nullptr, Concat("no memory for ", capacity, " bytes"));
  }
  return {data.get(), capacity};
}

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
  kernels::InlineExecutor executor;
  const kernels::AttendResult result =
      kernels::Attend(kernels_, batch, Workspace(kernels::AttendWorkspaceBytes(batch)), executor);
  if (result.status == kernels::AttendStatus::kOk) return result.implementation;
  return absl::InternalError(Concat("attention stopped with code ", static_cast<int>(result.status),
                                    " at item ", result.item));
}

}  // namespace tessera::device
