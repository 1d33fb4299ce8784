#include "daemon/device/cuda_device.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/device/cuda_call_context.h"
#include "daemon/device/cuda_memory_source.h"
#include "kernels/cuda/host/step_writer.h"
#include "kernels/cuda/select/selection_reader.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::device {

namespace cuda = kernels::cuda;

namespace {

// Limits per launch: number of runs, and bytes of rows from the host.
constexpr std::size_t kMostRuns = 16384;
constexpr std::uint64_t kMostHostBytes = std::uint64_t{8} << 20;
constexpr std::size_t kMostWords = 65536;
constexpr std::uint64_t kAlignment = 256;

std::uint64_t Aligned(std::uint64_t bytes) { return RoundUp(bytes, kAlignment); }
std::uint64_t AddressOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// Bytes of the rows of a run.
std::uint64_t BytesOf(const RowRun& run) {
  return std::uint64_t{run.value == nullptr ? 1u : 2u} * run.rows * run.row_bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(Options options) {
  const std::string name = Concat("cuda:", options.ordinal);
  int count = 0;
  if (const CudaResult result = options.calls->DeviceCount(&count); !result.ok()) {
    return absl::FailedPreconditionError(Concat(name, ": ", result.name));
  }
  if (options.ordinal >= count) {
    return absl::FailedPreconditionError(
        Concat(name, ": this process sees ", count, " CUDA devices"));
  }
  absl::StatusOr<ProbedCudaDevice> probed = ProbeCudaDevice(*options.calls, options.ordinal);
  if (!probed.ok()) {
    return absl::FailedPreconditionError(
        Concat(name, ": ", AsStringView(probed.status().message())));
  }
  std::unique_ptr<CudaDevice> device(new CudaDevice(std::move(options), *std::move(probed)));
  std::string reason;
  device->runtime_ = device->options_.gpus->Open(device->options_.ordinal, &reason);
  if (device->runtime_ == nullptr) {
    return absl::FailedPreconditionError(Concat(name, ": ", reason));
  }
  device->description_.kernels = device->runtime_->implementation();
  return device;
}

CudaDevice::CudaDevice(Options options, ProbedCudaDevice probed)
    : options_(std::move(options)),
      probed_(std::move(probed)),
      description_{.name = Concat("cuda:", options_.ordinal),
                   .model = probed_.info.name,
                   .uuid = probed_.info.uuid,
                   .granularity = kCudaGranularity,
                   .row_alignment = 16,
                   .observations_per_call = 64,
                   .waits_for_importers = true},
      pool_memory_(NewCudaPoolMemory(*options_.calls, options_.ordinal, probed_.sharing)) {}

CudaDevice::~CudaDevice() = default;

absl::Status CudaDevice::health() const {
  MutexLock lock(mutex_);
  return failed_;
}

absl::Status CudaDevice::Answer(const cuda::Error& error) {
  if (error.ok()) return absl::OkStatus();
  if (error.out_of_memory()) {
    return absl::ResourceExhaustedError(Concat(description_.name, ": ", error.text()));
  }
  absl::Status why =
      absl::UnavailableError(Concat("device ", description_.name, " has failed: ", error.text()));
  {
    MutexLock lock(mutex_);
    if (!failed_.ok()) return failed_;
    failed_ = why;
  }
  if (options_.on_failure) options_.on_failure(why);
  return why;
}

absl::StatusOr<CudaDevice::Taken> CudaDevice::AcquireBench() {
  {
    MutexLock lock(mutex_);
    if (!failed_.ok()) return failed_;
    if (!free_.empty()) {
      std::unique_ptr<Bench> bench = std::move(free_.back());
      free_.pop_back();
      return Taken(*this, std::move(bench));
    }
  }
  std::unique_ptr<cuda::Queue> queue;
  if (absl::Status status = Answer(runtime_->NewQueue(&queue)); !status.ok()) return status;
  return Taken(*this, std::make_unique<Bench>(*runtime_, std::move(queue)));
}

absl::StatusOr<std::unique_ptr<Memory>> CudaDevice::CreateWorkerMemory(std::string_view,
                                                                       std::uint64_t bytes) {
  if (absl::Status failed = health(); !failed.ok()) return failed;
  return CreateCudaWorkerMemory(*options_.calls, options_.ordinal, probed_.sharing, bytes);
}

// ---- rows and words

absl::StatusOr<std::optional<UnusableRow>> CudaDevice::StoreRows(Place source,
                                                                 kernels::ElementType type,
                                                                 std::span<const RowRun> runs) {
  absl::StatusOr<Taken> bench = AcquireBench();
  if (!bench.ok()) return bench.status();
  std::optional<UnusableRow> unusable;
  for (std::size_t first = 0; first < runs.size() && !unusable.has_value();) {
    std::uint64_t bytes = 0;
    std::size_t end = first;
    while (end < runs.size() && end - first < kMostRuns) {
      if (source == Place::kHost) {
        const std::uint64_t more = BytesOf(runs[end]);
        if (end > first && bytes + more > kMostHostBytes) break;
        bytes += more;
      }
      ++end;
    }
    const absl::Status status =
        StoreSome(**bench, source, type, runs.subspan(first, end - first), &unusable);
    if (!status.ok()) return status;
    if (unusable.has_value()) unusable->run += first;
    first = end;
  }
  return unusable;
}

// Stores the runs of one launch. Scratch on both sides: the result word | the runs | their rows, if
// they come from the host.
absl::Status CudaDevice::StoreSome(Bench& bench, Place source, kernels::ElementType type,
                                   std::span<const RowRun> runs,
                                   std::optional<UnusableRow>* unusable) {
  const std::uint64_t rows_at = kAlignment + Aligned(runs.size() * sizeof(cuda::RowRun));
  std::uint64_t bytes = rows_at;
  if (source == Place::kHost) {
    for (const RowRun& run : runs) bytes += BytesOf(run);
  }
  if (absl::Status status = Answer(bench.input().Grow(bytes)); !status.ok()) return status;
  std::byte* const host = bench.Host(bytes);
  std::memcpy(host, &cuda::kNoneUnusable, sizeof cuda::kNoneUnusable);
  std::uint64_t next = rows_at;
  const auto pack = [&](const std::byte* from, const RowRun& run) {
    if (from == nullptr) return std::uint64_t{0};
    const std::uint64_t at = next;
    for (std::uint32_t i = 0; i < run.rows; ++i, next += run.row_bytes) {
      std::memcpy(host + next, from + i * run.stride, run.row_bytes);
    }
    return AddressOf(bench.input().at(at));
  };
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RowRun& run = runs[i];
    const bool packed = source == Place::kHost;
    const cuda::RowRun out = {.key = packed ? pack(run.key, run) : AddressOf(run.key),
                              .value = packed ? pack(run.value, run) : AddressOf(run.value),
                              .stride = packed ? run.row_bytes : run.stride,
                              .key_target = AddressOf(run.key_target),
                              .value_target = AddressOf(run.value_target),
                              .rows = run.rows,
                              .row_bytes = run.row_bytes};
    std::memcpy(host + kAlignment + i * sizeof out, &out, sizeof out);
  }
  cuda::Queue& queue = bench.queue();
  std::uint64_t found = cuda::kNoneUnusable;
  cuda::Error error = queue.Copy(bench.input().at(), host, bytes);
  if (error.ok()) {
    error = queue.StoreRows({.runs = bench.input().at<cuda::RowRun>(kAlignment),
                             .found = bench.input().at<std::uint64_t>(),
                             .count = static_cast<std::uint32_t>(runs.size()),
                             .type = type});
  }
  if (error.ok()) error = queue.Copy(&found, bench.input().at(), sizeof found);
  if (error.ok()) error = queue.Wait();
  if (absl::Status status = Answer(error); !status.ok()) return status;
  if (found == cuda::kNoneUnusable) return absl::OkStatus();
  absl::StatusOr<UnusableRow> named = LocateUnusable(bench, type, runs, found);
  if (!named.ok()) return named.status();
  *unusable = *named;
  return absl::OkStatus();
}

// The kernel reports the row; the channel is found by checking the stored row on the host.
absl::StatusOr<UnusableRow> CudaDevice::LocateUnusable(Bench& bench, kernels::ElementType type,
                                                       std::span<const RowRun> runs,
                                                       std::uint64_t found) {
  UnusableRow named = {.run = cuda::UnusableWord::Run(found),
                       .row = cuda::UnusableWord::Row(found),
                       .of_value = cuda::UnusableWord::IsValue(found),
                       .channel = 0};
  TESSERA_CHECK(named.run < runs.size() && named.row < runs[named.run].rows,
                "the kernel must report one of the runs");
  const RowRun& run = runs[named.run];
  std::byte* const row = bench.Host(run.row_bytes);
  const std::byte* const stored = (named.of_value ? run.value_target : run.key_target) +
                                  std::uint64_t{named.row} * run.row_bytes;
  cuda::Error error = bench.queue().Copy(row, stored, run.row_bytes);
  if (error.ok()) error = bench.queue().Wait();
  if (absl::Status status = Answer(error); !status.ok()) return status;
  const std::int64_t channel = kernels::FirstUnusable(
      kernels::BestImplementation(), row, run.row_bytes / kernels::ElementBytes(type), type);
  TESSERA_CHECK(channel >= 0, "CPU and GPU must agree on which rows are usable");
  named.channel = static_cast<std::uint32_t>(channel);
  return named;
}

absl::Status CudaDevice::StoreWords(std::span<const WordStore> stores) {
  static_assert(sizeof(WordStore) == sizeof(cuda::WordStore));
  absl::StatusOr<Taken> taken = AcquireBench();
  if (!taken.ok()) return taken.status();
  Bench& bench = **taken;
  for (std::size_t first = 0; first < stores.size(); first += kMostWords) {
    const std::size_t count = std::min(stores.size() - first, kMostWords);
    const std::uint64_t bytes = count * sizeof(WordStore);
    if (absl::Status status = Answer(bench.input().Grow(bytes)); !status.ok()) return status;
    cuda::Error error = bench.queue().Copy(bench.input().at(), stores.data() + first, bytes);
    if (error.ok()) {
      error = bench.queue().StoreWords({.stores = bench.input().at<cuda::WordStore>(),
                                        .count = static_cast<std::uint32_t>(count)});
    }
    if (error.ok()) error = bench.queue().Wait();
    if (absl::Status status = Answer(error); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaDevice::Copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  absl::StatusOr<Taken> bench = AcquireBench();
  if (!bench.ok()) return bench.status();
  cuda::Error error = (**bench).queue().Copy(to, from, bytes);
  if (error.ok()) error = (**bench).queue().Wait();
  return Answer(error);
}

absl::Status CudaDevice::Read(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  return Copy(to, from, bytes);
}

absl::Status CudaDevice::Write(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  return Copy(to, from, bytes);
}

// ---- attention

// Maps a batch of AttendItems to a device: sequences of kv_heads items each, and the offsets of
// their rows in scratch.
//
//   fault | sinks | step image | queries || outputs | log-sum-exps
class CudaDevice::AttendLayout {
 public:
  AttendLayout(const kernels::AttendBatch& batch, const PoolView& pool) : batch_(batch) {
    const kernels::LayerGeometry& geometry = batch.geometry;
    shape_ = {.batch = static_cast<std::uint32_t>(batch.items.size() / geometry.kv_heads),
              .layers = 1,
              .lanes = static_cast<std::uint32_t>(batch.items.size()),
              .extents = static_cast<std::uint32_t>(pool.extents.size())};
    for (const kernels::AttendItem& item : batch.items) {
      shape_.segments += item.lane->segment_count;
      shape_.strategies += cuda::CountStrategies(*item.lane);
      if (item.selection == nullptr) continue;
      ++shape_.selections;
      shape_.choices += cuda::CountChoices(*item.lane);
    }
    for (std::uint32_t s = 0; s < shape_.batch; ++s) {
      rows_ += Sequence(s).queries;
      limits_.queries = std::max(limits_.queries, Sequence(s).queries);
    }
    limits_.batch = shape_.batch;
    sinks_at_ = kAlignment;
    step_at_ = sinks_at_ + (geometry.sinks != nullptr ? Aligned(SinkBytes()) : 0);
    queries_at_ = step_at_ + Aligned(cuda::StepBytes(shape_));
    outputs_at_ = queries_at_ + Aligned(rows_ * QueryRowBytes());
    lse_at_ = outputs_at_ + Aligned(rows_ * OutputRowBytes());
    bytes_ = lse_at_ + Aligned(rows_ * LseRowBytes());
  }

  const kernels::AttendItem& Sequence(std::uint32_t index) const {
    return batch_.items[std::size_t{index} * batch_.geometry.kv_heads];
  }
  std::uint64_t SinkBytes() const { return batch_.geometry.query_heads * sizeof(float); }
  std::uint64_t QueryRowBytes() const {
    return std::uint64_t{batch_.geometry.query_heads} * batch_.geometry.head_dim *
           kernels::ElementBytes(batch_.geometry.type);
  }
  std::uint64_t OutputRowBytes() const {
    return std::uint64_t{batch_.geometry.query_heads} * batch_.geometry.head_dim *
           kernels::ElementBytes(batch_.output_type);
  }
  std::uint64_t LseRowBytes() const { return batch_.geometry.query_heads * sizeof(float); }

  // Writes everything up to and including the queries.
  cuda::StepStatus WriteInputs(const PoolView& pool, std::byte* host) {
    std::memcpy(host, &cuda::kNoFault, sizeof cuda::kNoFault);
    if (batch_.geometry.sinks != nullptr) {
      std::memcpy(host + sinks_at_, batch_.geometry.sinks, SinkBytes());
    }
    std::uint64_t at = queries_at_;
    for (std::uint32_t s = 0; s < shape_.batch; ++s) {
      const std::uint64_t bytes = Sequence(s).queries * QueryRowBytes();
      std::memcpy(host + at, Sequence(s).query, bytes);
      at += bytes;
    }
    return WriteStep(pool, host);
  }

  std::uint64_t input_bytes() const { return outputs_at_; }
  std::uint64_t bytes() const { return bytes_; }
  const cuda::StepLimits& limits() const { return limits_; }

  cuda::AttendCall Call(const cuda::Scratch& memory) const {
    kernels::LayerGeometry geometry = batch_.geometry;
    if (geometry.sinks != nullptr) geometry.sinks = memory.at<const float>(sinks_at_);
    return {.geometry = geometry,
            .causal = batch_.causal,
            .output_type = batch_.output_type,
            .layer = 0,
            .limits = limits_,
            .step = memory.at(step_at_),
            .query = memory.at(queries_at_),
            .output = memory.at(outputs_at_),
            .lse = memory.at<float>(lse_at_),
            .fault = memory.at<std::uint64_t>()};
  }

  // `host` holds the downloaded results, outputs first.
  void Scatter(const std::byte* host) const {
    const std::byte* output = host;
    const std::byte* lse = host + (lse_at_ - outputs_at_);
    for (std::uint32_t s = 0; s < shape_.batch; ++s) {
      const kernels::AttendItem& item = Sequence(s);
      std::memcpy(item.output, output, item.queries * OutputRowBytes());
      if (item.lse != nullptr) std::memcpy(item.lse, lse, item.queries * LseRowBytes());
      output += item.queries * OutputRowBytes();
      lse += item.queries * LseRowBytes();
    }
  }
  // Address at which WriteInputs wrote the step image.
  const std::byte* Image(const std::byte* host) const { return host + step_at_; }
  std::uint64_t result_bytes() const { return bytes_ - outputs_at_; }
  std::uint64_t results_at() const { return outputs_at_; }

 private:
  cuda::StepStatus WriteStep(const PoolView& pool, std::byte* host) {
    cuda::StepWriter writer({host + step_at_, queries_at_ - step_at_}, shape_);
    std::vector<std::uint64_t> bases;
    for (std::byte* extent : pool.extents) bases.push_back(AddressOf(extent));
    writer.SetExtents(bases, pool.extent_bytes);
    std::uint32_t row = 0;
    for (std::uint32_t s = 0; s < shape_.batch; ++s) {
      const kernels::AttendItem& item = Sequence(s);
      std::uint64_t end = 0;
      for (std::uint32_t head = 0; head < batch_.geometry.kv_heads; ++head) {
        end = std::max(end, (&item)[head].lane->tail.end);
      }
      writer.SetSequence(s, {.committed = end,
                             .first_query_position = item.first_query_position,
                             .appended = 0,
                             .queries = item.queries,
                             .first_append_row = 0,
                             .first_query_row = row,
                             .rule = cuda::StepRuleOf(item.selection)});
      row += item.queries;
    }
    writer.BeginLayer(batch_.geometry.kv_heads, batch_.geometry.type);
    for (const kernels::AttendItem& item : batch_.items) writer.AddLane(*item.lane);
    writer.Widen(limits_);
    return writer.Finish();
  }

  const kernels::AttendBatch& batch_;
  cuda::StepShape shape_;
  cuda::StepLimits limits_;
  std::uint64_t rows_ = 0;
  std::uint64_t sinks_at_, step_at_, queries_at_, outputs_at_, lse_at_, bytes_;
};

// Writes a batch and uploads it to the device.
absl::StatusOr<cuda::AttendCall> CudaDevice::Upload(const kernels::AttendBatch& batch,
                                                    const PoolView& pool, AttendLayout& layout,
                                                    Bench& bench) {
  std::byte* const host = bench.Host(layout.bytes());
  if (const cuda::StepStatus status = layout.WriteInputs(pool, host);
      status != cuda::StepStatus::kOk) {
    return absl::InternalError(
        Concat("StepWriter rejected a lane: status ", static_cast<int>(status)));
  }
  const std::uint64_t partial = cuda::AttendScratchBytes(batch.geometry, layout.limits());
  cuda::Error error = bench.input().Grow(layout.bytes());
  if (error.ok()) error = bench.partial().Grow(partial);
  if (error.ok()) error = bench.queue().Copy(bench.input().at(), host, layout.input_bytes());
  if (absl::Status status = Answer(error); !status.ok()) return status;
  cuda::AttendCall call = layout.Call(bench.input());
  call.scratch = bench.partial().at();
  call.scratch_bytes = bench.partial().bytes();
  return call;
}

namespace {

absl::Status FaultStatus(std::uint64_t fault) {
  if (fault == cuda::kNoFault) return absl::OkStatus();
  return absl::InternalError(Concat("attention failed with fault ",
                                    static_cast<int>(cuda::FaultWord::Kind(fault)), " at item ",
                                    cuda::FaultWord::Lane(fault)));
}

}  // namespace

absl::StatusOr<std::string_view> CudaDevice::Attend(const kernels::AttendBatch& batch,
                                                    const PoolView& pool) {
  if (absl::Status status = CheckServed(batch); !status.ok()) return status;
  absl::StatusOr<Taken> taken = AcquireBench();
  if (!taken.ok()) return taken.status();
  Bench& bench = **taken;
  AttendLayout layout(batch, pool);
  const absl::StatusOr<cuda::AttendCall> call = Upload(batch, pool, layout, bench);
  if (!call.ok()) return call.status();
  std::byte* const host = bench.Host(layout.bytes());
  cuda::Queue& queue = bench.queue();
  cuda::Error error = queue.Attend(*call);
  std::uint64_t fault = cuda::kNoFault;
  if (error.ok()) error = queue.Copy(&fault, bench.input().at(), sizeof fault);
  if (error.ok()) {
    error = queue.Copy(host, bench.input().at(layout.results_at()), layout.result_bytes());
  }
  if (error.ok()) error = queue.Wait();
  if (absl::Status status = Answer(error); !status.ok()) return status;
  if (absl::Status status = FaultStatus(fault); !status.ok()) return status;
  layout.Scatter(host);
  return std::string_view(runtime_->implementation());
}

absl::StatusOr<std::string_view> CudaDevice::Select(const kernels::AttendBatch& batch,
                                                    const PoolView& pool,
                                                    kernels::SelectionSink& sink) {
  if (absl::Status status = CheckServed(batch); !status.ok()) return status;
  absl::StatusOr<Taken> bench_taken = AcquireBench();
  if (!bench_taken.ok()) return bench_taken.status();
  Bench& bench = **bench_taken;
  AttendLayout layout(batch, pool);
  const absl::StatusOr<cuda::AttendCall> call = Upload(batch, pool, layout, bench);
  if (!call.ok()) return call.status();
  const cuda::AttendParams params = cuda::MakeAttendParams(*call);
  const cuda::StepLimits& limits = layout.limits();
  std::vector<std::uint32_t> taken(limits.blocks);
  std::vector<cuda::SelectedRange> ranges(limits.choices + limits.selections);
  cuda::Queue& queue = bench.queue();
  cuda::Error error = queue.Select(*call);
  std::uint64_t fault = cuda::kNoFault;
  if (error.ok()) error = queue.Copy(&fault, bench.input().at(), sizeof fault);
  if (error.ok()) error = queue.Copy(taken.data(), params.taken, taken.size() * sizeof taken[0]);
  if (error.ok()) {
    error = queue.Copy(ranges.data(), params.ranges, ranges.size() * sizeof ranges[0]);
  }
  if (error.ok()) error = queue.Wait();
  if (absl::Status status = Answer(error); !status.ok()) return status;
  if (absl::Status status = FaultStatus(fault); !status.ok()) return status;
  // The uploaded image is still in the host buffer.
  const cuda::SelectionReader selection(layout.Image(bench.Host(layout.bytes())), 0, taken, ranges);
  for (std::uint32_t i = 0; i < batch.items.size(); ++i) {
    selection.ForEachRun(i, [&](const cuda::SelectedEntries& run) {
      sink.Take(i,
                {.segment = run.segment, .first_entry = run.first_entry, .entries = run.entries});
    });
  }
  return std::string_view(runtime_->implementation());
}

}  // namespace tessera::device
