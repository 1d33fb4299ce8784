#include "client/gpu_backend.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "daemon/base/strings.h"
#include "kernels/cuda/step_view.h"

namespace tessera::client {

namespace cuda = kernels::cuda;

namespace {

constexpr std::uint64_t kAlignment = 256;  // of the parts of device memory
constexpr std::uint64_t kTensorAlignment = 16;

std::uint64_t AddressOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

absl::Status CheckAddress(std::string_view what, const void* address) {
  if (AddressOf(address) % kTensorAlignment == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(what, " starts at an address that is no multiple of ",
                                           kTensorAlignment, "; on a GPU it has to"));
}

}  // namespace

GpuBackend::GpuBackend(Gpu& gpu, const Extents& extents)
    : gpu_(gpu), extents_(extents), memory_(gpu.runtime()), partial_(gpu.runtime()) {}

absl::Status GpuBackend::TakeQueue(void* stream) {
  if (queue_ != nullptr && stream == stream_) return absl::OkStatus();
  queue_ = nullptr;
  stream_ = stream;
  return GpuStatus(stream != nullptr ? gpu_.runtime().Borrow(stream, &queue_)
                                     : gpu_.runtime().NewQueue(&queue_));
}

// Lays out device memory as well.
cuda::StepShape GpuBackend::Measure(const StepBatch& batch) {
  const BoundModel& model = batch.model();
  const auto sequences = static_cast<std::uint32_t>(batch.items().size());
  cuda::StepShape shape = {.batch = sequences,
                           .layers = model.layers(),
                           .lanes = sequences * model.layout().lanes(),
                           .extents = static_cast<std::uint32_t>(bases_.size())};
  limits_ = {.batch = sequences, .queries = 1, .appended = 1, .works = 0};
  for (const StepItem& item : batch.items()) {
    shape.segments += static_cast<std::uint32_t>(item.sequence->resolved.segments.size());
    limits_.queries = limits_.appended = std::max(limits_.queries, item.new_tokens);
  }
  sinks_at_.assign(model.layers(), 0);
  std::uint64_t next = kAlignment;  // after the fault word
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    if (model.geometry(layer).sinks == nullptr) continue;
    sinks_at_[layer] = next;
    next += (model.geometry(layer).query_heads * sizeof(float) + kAlignment - 1) / kAlignment *
            kAlignment;
  }
  image_at_ = next;
  image_bytes_ = cuda::StepBytes(shape);
  return shape;
}

absl::Status GpuBackend::Begin(const StepBatch& batch, const StepOptions& options) {
  if (absl::Status status = TakeQueue(options.cuda_stream); !status.ok()) return status;
  extents_.ListPoolExtents(bases_);
  const cuda::StepShape shape = Measure(batch);
  host_.resize((image_at_ + image_bytes_) / sizeof(Line) + 1);
  std::byte* const host = host_.data()->bytes;
  std::memcpy(host, &cuda::kNoFault, sizeof cuda::kNoFault);
  for (std::uint32_t layer = 0; layer < batch.model().layers(); ++layer) {
    const kernels::LayerGeometry& geometry = batch.model().geometry(layer);
    if (geometry.sinks == nullptr) continue;
    std::memcpy(host + sinks_at_[layer], geometry.sinks, geometry.query_heads * sizeof(float));
  }
  if (absl::Status status = WriteImage(batch, shape); !status.ok()) return status;
  return Upload(batch);
}

absl::Status GpuBackend::WriteImage(const StepBatch& batch, const cuda::StepShape& shape) {
  const BoundModel& model = batch.model();
  cuda::StepWriter writer({host_.data()->bytes + image_at_, image_bytes_}, shape);
  writer.SetExtents(bases_, extents_.pool_extent_bytes());
  for (std::uint32_t i = 0; i < shape.batch; ++i) {
    const StepItem& item = batch.items()[i];
    const auto first_row = static_cast<std::uint32_t>(item.first_row);
    writer.SetSequence(i, {.committed = item.base,
                           .first_query_position = item.base,
                           .appended = item.new_tokens,
                           .queries = item.new_tokens,
                           .first_append_row = first_row,
                           .first_query_row = first_row});
  }
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    const std::uint32_t heads = model.layout().kv_heads(layer);
    writer.BeginLayer(heads, model.type());
    for (const StepItem& item : batch.items()) {
      for (std::uint32_t head = 0; head < heads; ++head) {
        AddLane(item.sequence->resolved.lanes[model.layout().lane(layer, head)], writer);
      }
    }
  }
  limits_.works = writer.max_works();
  if (const cuda::StepStatus status = writer.Finish(); status != cuda::StepStatus::kOk) {
    return absl::InternalError(
        Concat("the lanes of the step do not fit its image: code ", static_cast<int>(status)));
  }
  return absl::OkStatus();
}

void GpuBackend::AddLane(const kernels::LaneView& lane, cuda::StepWriter& writer) {
  segments_.clear();
  for (std::uint32_t i = 0; i < lane.segment_count; ++i) {
    const kernels::SegmentView& segment = lane.segments[i];
    segments_.push_back({.tile_table = AddressOf(segment.tile_offsets) - AddressOf(segment.arena),
                         .first_position = segment.first_position,
                         .entries = segment.entries,
                         .format = segment.format});
  }
  writer.AddLane(segments_, {.ring = AddressOf(lane.tail.ring),
                             .ring_tiles = lane.tail.ring_tiles,
                             .begin = lane.tail.begin});
}

absl::Status GpuBackend::Upload(const StepBatch& batch) {
  const std::uint64_t bytes = image_at_ + image_bytes_;
  std::uint64_t partial = 0;
  for (std::uint32_t layer = 0; layer < batch.model().layers(); ++layer) {
    partial = std::max(partial, cuda::AttendScratchBytes(batch.model().geometry(layer), limits_));
  }
  // Twice what is needed: lanes grow, and a steady decode shall not allocate.
  cuda::Error error;
  if (bytes > memory_.bytes()) error = memory_.Grow(2 * bytes);
  if (error.ok() && partial > partial_.bytes()) error = partial_.Grow(2 * partial);
  if (error.ok()) error = queue_->Copy(memory_.at(), host_.data(), bytes);
  under_way_ = true;
  return GpuStatus(error);
}

absl::Status GpuBackend::Append(const StepBatch& batch, std::uint32_t layer,
                                std::span<const std::byte> key, std::span<const std::byte> value) {
  absl::Status status = CheckAddress("key", key.data());
  if (status.ok()) status = CheckAddress("value", value.data());
  if (!status.ok()) return status;
  const BoundModel& model = batch.model();
  return GpuStatus(queue_->Append({.step = memory_.at(image_at_),
                                   .key = key.data(),
                                   .value = value.data(),
                                   .fault = memory_.at<std::uint64_t>(),
                                   .row_stride = model.token_bytes(layer),
                                   .layer = layer,
                                   .row_bytes = static_cast<std::uint32_t>(model.row_bytes(layer)),
                                   .kv_heads = model.geometry(layer).kv_heads,
                                   .max_batch = limits_.batch,
                                   .max_appended = limits_.appended}));
}

absl::Status GpuBackend::Attend(const StepBatch& batch, std::uint32_t layer,
                                const StepTensors& tensors) {
  absl::Status status = CheckAddress("query", tensors.query.data());
  if (status.ok()) status = CheckAddress("output", tensors.output.data());
  if (!status.ok()) return status;
  kernels::LayerGeometry geometry = batch.model().geometry(layer);
  if (sinks_at_[layer] != 0) geometry.sinks = memory_.at<const float>(sinks_at_[layer]);
  return GpuStatus(queue_->Attend({.geometry = geometry,
                                   .causal = tensors.causal,
                                   .appended = batch.appended(layer),
                                   .output_type = tensors.output_type,
                                   .layer = layer,
                                   .limits = limits_,
                                   .step = memory_.at(image_at_),
                                   .query = tensors.query.data(),
                                   .output = tensors.output.data(),
                                   .lse = tensors.lse.empty() ? nullptr : tensors.lse.data(),
                                   .scratch = partial_.at(),
                                   .scratch_bytes = partial_.bytes(),
                                   .fault = memory_.at<std::uint64_t>()}));
}

absl::Status GpuBackend::Settle(const StepBatch& batch) {
  if (!under_way_) return absl::OkStatus();
  under_way_ = false;
  std::uint64_t fault = cuda::kNoFault;
  cuda::Error error = queue_->Copy(&fault, memory_.at(), sizeof fault);
  if (error.ok()) error = queue_->Wait();
  if (!error.ok()) return GpuStatus(error);
  if (fault == cuda::kNoFault) return absl::OkStatus();
  const std::uint32_t layer = cuda::FaultWord::Layer(fault);
  const std::uint32_t sequence =
      cuda::FaultWord::Lane(fault) / batch.model().geometry(layer).kv_heads;
  return absl::DataLossError(
      Concat(batch.items()[sequence].sequence->id.ToString(), ", layer ", layer));
}

}  // namespace tessera::client
