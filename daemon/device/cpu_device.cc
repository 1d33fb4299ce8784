#include "daemon/device/cpu_device.h"

#include <cstdlib>
#include <cstring>

#include "daemon/base/strings.h"
#include "daemon/platform/memfd.h"

namespace tessera::device {

namespace {

// Limit per call. Scratch is not charged to any quota, and a selection is computed as a whole.
constexpr std::size_t kMostScratch = std::size_t{256} << 20;

// One thread's scratch. Small buffers are kept, so that calls usually allocate nothing.
class Workspace {
 public:
  // Returns an empty span if there is no memory.
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

// Encodes tiles from tiles. Keeps the prepared rotations of a strategy until the next strategy.
class Encoder {
 public:
  Encoder(const kernels::Operations& operations, std::span<const TileStrategy> strategies,
          kernels::ElementType type)
      : operations_(operations), strategies_(strategies), type_(type) {}

  // Returns false if a value does not fit the tile's type.
  absl::StatusOr<bool> Encode(const TileEncode& tile) {
    if (absl::Status status = Prepare(tile.strategy); !status.ok()) return status;
    const kernels::TileShape& shape = strategies_[tile.strategy].shape;
    return operations_.encode({.key = tile.key,
                               .value = tile.value,
                               .stride = shape.head_dim * kernels::ElementBytes(type_),
                               .type = type_,
                               .rows = tile.rows,
                               .weights = tile.weights,
                               .positions = tile.positions,
                               .shape = shape,
                               .layout = layout_,
                               .prepared = prepared_.data(),
                               .tile = tile.to.tile,
                               .summaries = tile.to.summaries,
                               .key_error_limit = strategies_[tile.strategy].limits.key,
                               .value_error_limit = strategies_[tile.strategy].limits.value});
  }

 private:
  absl::Status Prepare(std::uint32_t strategy) {
    const TileStrategy& next = strategies_[strategy];
    if (prepared_for_ == &next) return absl::OkStatus();
    layout_ = kernels::LayoutOf(next.shape);
    if (next.shape.packed() || next.shape.summary == kernels::Summary::kSigns) {
      const std::size_t bytes = operations_.prepared_bytes(next.shape, type_);
      prepared_ = scratch_.Take(bytes);
      if (prepared_.size() < bytes) {
        return absl::ResourceExhaustedError(
            Concat("encoding needs ", bytes,
                   " bytes of scratch memory, but the machine is out of memory; retry "
                   "after other requests have ended"));
      }
      operations_.prepare_encode(next.shape, type_, next.rotation, prepared_.data());
    }
    prepared_for_ = &next;
    return absl::OkStatus();
  }

  const kernels::Operations& operations_;
  const std::span<const TileStrategy> strategies_;
  const kernels::ElementType type_;
  Workspace scratch_;
  std::span<std::byte> prepared_;
  kernels::TileLayout layout_{};
  const TileStrategy* prepared_for_ = nullptr;
};

}  // namespace

CpuDevice::CpuDevice(const kernels::Implementation& kernels, const std::optional<DeviceUuid>& uuid)
    : kernels_(kernels),
      description_{.name = "cpu",
                   .kernels = std::string(kernels::ImplementationName(kernels)),
                   .uuid = uuid,
                   .granularity = PageBytes(),
                   .reads_host_memory = true} {}

absl::StatusOr<std::unique_ptr<Memory>> CpuDevice::CreateWorkerMemory(std::string_view name,
                                                                      std::uint64_t bytes) {
  return CreateHostWorkerMemory(name, bytes);
}

absl::StatusOr<std::optional<UnusableRow>> CpuDevice::StoreRows(Place, kernels::ElementType type,
                                                                std::span<const RowRun> runs) {
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RowRun& run = runs[i];
    CopyRows(run.key, run.stride, run.rows, run.row_bytes, run.key_target);
    if (run.value != nullptr) {
      CopyRows(run.value, run.stride, run.rows, run.row_bytes, run.value_target);
    }
    const std::size_t elements = run.row_bytes / kernels::ElementBytes(type);
    for (const bool of_value : {false, true}) {
      if (of_value && run.value == nullptr) continue;
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

absl::StatusOr<std::optional<std::size_t>> CpuDevice::Encode(
    std::span<const TileStrategy> strategies, kernels::ElementType type,
    std::span<const TileEncode> tiles) {
  Encoder encoder(kernels::OperationsOf(kernels_), strategies, type);
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    absl::StatusOr<bool> fits = encoder.Encode(tiles[i]);
    if (!fits.ok()) return fits.status();
    if (!*fits) return i;
  }
  return std::nullopt;
}

absl::Status CpuDevice::Gather(const kernels::TileShape& from, const kernels::TileShape& to,
                               std::span<const TileGather> tiles) {
  const kernels::Operations& operations = kernels::OperationsOf(kernels_);
  for (const TileGather& tile : tiles) {
    operations.gather({.rows = tile.rows.data(),
                       .row_count = static_cast<std::uint32_t>(tile.rows.size()),
                       .from = from,
                       .from_layout = kernels::LayoutOf(from),
                       .to = to,
                       .to_layout = kernels::LayoutOf(to),
                       .tile = tile.to.tile,
                       .summaries = tile.to.summaries});
  }
  return absl::OkStatus();
}

absl::Status CpuDevice::StoreWords(std::span<const WordStore> stores) {
  for (const WordStore& store : stores) std::memcpy(store.address, &store.word, sizeof store.word);
  return absl::OkStatus();
}

absl::Status CpuDevice::Read(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::Status CpuDevice::Write(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::StatusOr<std::string_view> CpuDevice::Attend(const kernels::AttendBatch& batch,
                                                   const PoolView&) {
  return Run(batch, [&](std::span<std::byte> scratch) {
    kernels::InlineExecutor executor;
    return kernels::Attend(kernels_, batch, scratch, executor);
  });
}

absl::StatusOr<std::string_view> CpuDevice::Select(const kernels::AttendBatch& batch,
                                                   const PoolView&, kernels::SelectionSink& sink) {
  return Run(batch, [&](std::span<std::byte> scratch) {
    kernels::InlineExecutor executor;
    return kernels::Select(kernels_, batch, scratch, executor, sink);
  });
}

absl::StatusOr<std::string_view> CpuDevice::Run(
    const kernels::AttendBatch& batch,
    const std::function<kernels::AttendResult(std::span<std::byte>)>& compute) {
  thread_local Workspace workspace;
  const std::size_t needed = kernels::AttendWorkspaceBytes(batch);
  if (needed > kMostScratch) {
    return absl::ResourceExhaustedError(
        Concat("attention needs ", needed, " bytes of scratch memory; the limit is ", kMostScratch,
               "; ask for fewer queries or entries at a time"));
  }
  const std::span<std::byte> scratch = workspace.Take(needed);
  if (scratch.size() < needed) {
    return absl::ResourceExhaustedError(Concat("attention needs ", needed,
                                               " bytes of scratch memory, but the machine is out "
                                               "of memory; retry after other requests have ended"));
  }
  const kernels::AttendResult result = compute(scratch);
  workspace.Return();
  if (result.status == kernels::AttendStatus::kOk) return result.implementation;
  return absl::InternalError(Concat("attention failed with status ",
                                    static_cast<int>(result.status), " at item ", result.item));
}

}  // namespace tessera::device
