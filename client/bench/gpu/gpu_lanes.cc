#include "client/bench/gpu/gpu_lanes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <span>

#include "client/gpu/gpu.h"
#include "daemon/base/strings.h"
#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/params.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cli::bench {

namespace cuda = kernels::cuda;
using client::GpuStatus;

namespace {

constexpr std::uint64_t kAlignment = 256;

constexpr std::uint64_t RoundUp(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuLanes>> GpuLanes::Upload(cuda::Runtime& runtime,
                                                           cuda::Queue& queue,
                                                           const LaneSet& lanes) {
  std::unique_ptr<GpuLanes> set(new GpuLanes(runtime, lanes));
  if (absl::Status status = set->Place(queue); !status.ok()) return status;
  return set;
}

absl::Status GpuLanes::Put(cuda::Queue& queue, const void* data, std::uint64_t bytes,
                           std::uint64_t* offset) {
  *offset = bytes_;
  bytes_ += RoundUp(bytes);
  return GpuStatus(queue.Copy(pool_.at(*offset), data, bytes));
}

absl::Status GpuLanes::Place(cuda::Queue& queue) {
  const LaneSetShape& shape = lanes_.shape();
  const std::uint64_t rotation =
      shape.tile.packed()
          ? kernels::RotationBytes(shape.tile, shape.tile.key, kernels::ElementType::kBf16)
          : 0;
  std::uint64_t need = RoundUp(lanes_.bytes());
  for (std::uint32_t i = 0; i < shape.lanes; ++i) {
    const kernels::LaneView& lane = lanes_.lane(i);
    for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
      const std::uint64_t table = cuda::TilesOf(lane.segments[s].entries) * 8;
      need += 2 * RoundUp(table) + 2 * RoundUp(rotation);
    }
  }
  if (absl::Status status = GpuStatus(pool_.Grow(need)); !status.ok()) return status;
  std::uint64_t zero = 0;
  absl::Status status = Put(queue, lanes_.data(), lanes_.bytes(), &zero);
  for (std::uint32_t i = 0; i < shape.lanes; ++i) {
    std::vector<cuda::SegmentSpec>& segments = segments_.emplace_back();
    const kernels::LaneView& lane = lanes_.lane(i);
    for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
      const kernels::SegmentView& view = lane.segments[s];
      const std::uint64_t table = cuda::TilesOf(view.entries) * 8;
      cuda::SegmentSpec spec = {.first_position = view.first_position,
                                .entries = view.entries,
                                .shape = view.shape,
                                .position_span = view.positions()};
      status.Update(Put(queue, view.tile_offsets, table, &spec.tile_table));
      status.Update(Put(queue, view.summary_offsets, table, &spec.summary_table));
      if (rotation != 0) {
        status.Update(Put(queue, view.rotation.key, rotation, &spec.key_rotation));
        status.Update(Put(queue, view.rotation.value, rotation, &spec.value_rotation));
      }
      segments.push_back(spec);
    }
  }
  status.Update(GpuStatus(queue.Wait()));
  return status;
}

GpuAttention::GpuAttention(cuda::Runtime& runtime, cuda::Queue& queue, const GpuLanes& lanes,
                           const GpuBatchShape& shape)
    : queue_(queue),
      lanes_(lanes),
      shape_(shape),
      geometry_{.query_heads = shape.kv_heads * shape.group,
                .kv_heads = shape.kv_heads,
                .head_dim = lanes.host().shape().tile.head_dim,
                .type = kernels::ElementType::kBf16,
                .scale = 1 / std::sqrt(static_cast<float>(lanes.host().shape().tile.head_dim))},
      memory_(runtime),
      output_(runtime),
      partial_(runtime) {}

absl::StatusOr<std::unique_ptr<GpuAttention>> GpuAttention::Prepare(cuda::Runtime& runtime,
                                                                    cuda::Queue& queue,
                                                                    const GpuLanes& lanes,
                                                                    const GpuBatchShape& shape) {
  std::unique_ptr<GpuAttention> attention(new GpuAttention(runtime, queue, lanes, shape));
  if (absl::Status status = attention->Write(); !status.ok()) return status;
  return attention;
}

absl::Status GpuAttention::Write() {
  const std::uint32_t lanes = shape_.count * shape_.kv_heads;
  const std::uint32_t first_lane = shape_.first * shape_.kv_heads;
  cuda::StepShape step = {.batch = shape_.count, .layers = 1, .lanes = lanes, .extents = 1};
  for (std::uint32_t i = 0; i < lanes; ++i) {
    const kernels::LaneView& lane = lanes_.host().lane(first_lane + i);
    const std::uint32_t choices = cuda::CountChoices(lane);
    step.segments += lane.segment_count;
    step.strategies += cuda::CountStrategies(lane);
    step.choices += choices;
    step.selections += choices != 0 ? 1 : 0;
  }
  std::vector<std::uint64_t> image(cuda::StepBytes(step) / sizeof(std::uint64_t) + 4);
  std::byte* bytes = reinterpret_cast<std::byte*>(image.data());
  bytes += (16 - reinterpret_cast<std::uintptr_t>(bytes) % 16) % 16;
  cuda::StepWriter writer({bytes, cuda::StepBytes(step)}, step);
  const std::uint64_t base = reinterpret_cast<std::uint64_t>(lanes_.data());
  writer.SetExtents({&base, 1}, lanes_.bytes());
  const kernels::SelectionRule rule = {.rate = shape_.rate};
  const std::uint32_t tokens = lanes_.host().shape().tokens;
  for (std::uint32_t i = 0; i < shape_.count; ++i) {
    writer.SetSequence(i, {.committed = tokens,
                           .first_query_position = tokens - shape_.queries,
                           .appended = 0,
                           .queries = shape_.queries,
                           .first_append_row = 0,
                           .first_query_row = i * shape_.queries,
                           .rule = cuda::StepRuleOf(shape_.rate < 1 ? &rule : nullptr)});
  }
  writer.BeginLayer(shape_.kv_heads, kernels::ElementType::kBf16);
  for (std::uint32_t i = 0; i < lanes; ++i) {
    writer.AddLane(lanes_.segments(first_lane + i), cuda::TailSpec{});
  }
  cuda::StepLimits limits = {.batch = shape_.count, .queries = shape_.queries, .appended = 1};
  writer.Widen(limits);
  if (const cuda::StepStatus status = writer.Finish(); status != cuda::StepStatus::kOk) {
    return absl::InternalError(
        Concat("the benchmark's lanes do not fit a step; status ", static_cast<int>(status)));
  }

  const std::uint64_t rows = std::uint64_t{shape_.count} * shape_.queries * geometry_.query_heads;
  query_.resize(rows * geometry_.head_dim);
  std::mt19937_64 random(shape_.group);
  std::normal_distribution<float> normal;
  for (std::uint16_t& value : query_) value = kernels::FloatToBf16(normal(random));
  output_bytes_ = rows * geometry_.head_dim * sizeof(float);
  const std::uint64_t step_at = kAlignment;  // after the fault word
  const std::uint64_t query_at = step_at + RoundUp(writer.bytes());
  const std::uint64_t query_bytes = query_.size() * sizeof query_[0];
  const std::uint64_t partial = cuda::AttendScratchBytes(geometry_, limits);
  const std::vector<std::byte> nothing(output_bytes_, std::byte{0xff});  // NaN
  absl::Status status = GpuStatus(memory_.Grow(query_at + query_bytes));
  if (status.ok()) status = GpuStatus(output_.Grow(output_bytes_));
  if (status.ok()) status = GpuStatus(partial_.Grow(partial));
  if (!status.ok()) return status;
  status.Update(GpuStatus(queue_.Copy(memory_.at(), &cuda::kNoFault, sizeof cuda::kNoFault)));
  status.Update(GpuStatus(queue_.Copy(memory_.at(step_at), bytes, writer.bytes())));
  status.Update(GpuStatus(queue_.Copy(memory_.at(query_at), query_.data(), query_bytes)));
  status.Update(GpuStatus(queue_.Copy(output_.at(), nothing.data(), output_bytes_)));
  status.Update(GpuStatus(queue_.Wait()));
  call_ = {.geometry = geometry_,
           .limits = limits,
           .step = memory_.at(step_at),
           .query = memory_.at(query_at),
           .output = output_.at(),
           .scratch = partial_.at(),
           .scratch_bytes = partial,
           .fault = memory_.at<std::uint64_t>()};
  return status;
}

absl::StatusOr<std::vector<float>> GpuAttention::FromCpu() {
  std::vector<float> output(std::size_t{shape_.queries} * geometry_.query_heads *
                            geometry_.head_dim);
  std::vector<kernels::AttendItem> items;
  for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
    items.push_back({.lane = &lanes_.host().lane(shape_.first * shape_.kv_heads + head),
                     .kv_head = head,
                     .queries = shape_.queries,
                     .first_query_position = lanes_.host().shape().tokens - shape_.queries,
                     .query = query_.data(),
                     .output = output.data()});
  }
  const kernels::AttendBatch batch = {.geometry = geometry_, .items = items};
  std::vector<std::byte> workspace(kernels::AttendWorkspaceBytes(batch) + 64);
  void* start = workspace.data();
  std::size_t space = workspace.size();
  std::align(64, space - 64, start, space);
  client::ThreadTeam alone(1);
  const kernels::AttendResult result = kernels::Attend(
      kernels::BestImplementation(), batch, {static_cast<std::byte*>(start), space}, alone);
  if (result.status == kernels::AttendStatus::kOk) return output;
  return absl::InternalError("the CPU's attention rejected the benchmark's lanes");
}

absl::StatusOr<double> GpuAttention::Error() {
  std::uint64_t fault = 0;
  std::vector<float> output(output_bytes_ / sizeof(float));
  absl::Status status = GpuStatus(queue_.Copy(&fault, memory_.at(), sizeof fault));
  status.Update(GpuStatus(queue_.Copy(output.data(), output_.at(), output_bytes_)));
  status.Update(GpuStatus(queue_.Wait()));
  if (!status.ok()) return status;
  if (fault != cuda::kNoFault) {
    return absl::InternalError("the GPU's attention rejected the benchmark's lanes");
  }
  if (!std::ranges::all_of(output, [](float value) { return std::isfinite(value); })) {
    return absl::InternalError("the GPU's attention output contains NaN or infinity");
  }
  if (shape_.rate < 1) return 0.0;
  const absl::StatusOr<std::vector<float>> expected = FromCpu();
  if (!expected.ok()) return expected.status();
  double worst = 0;
  double squares = 0;
  for (std::size_t i = 0; i < expected->size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(output[i]) - (*expected)[i]));
    squares += static_cast<double>((*expected)[i]) * (*expected)[i];
  }
  return worst / std::sqrt(squares / static_cast<double>(expected->size()));
}

}  // namespace tessera::cli::bench
