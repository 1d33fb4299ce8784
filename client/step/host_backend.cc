#include "client/step/host_backend.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

#include "client/session/kernel_types.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "proto/shm/tail_ring.h"

namespace tessera::client {

namespace {

constexpr std::size_t kWorkspaceAlignment = 64;

}  // namespace

void HostBackend::FreeAligned::operator()(std::byte* bytes) const { std::free(bytes); }

absl::Status HostBackend::Begin(const StepBatch&, const StepOptions& options) {
  executor_.Use(options.executor);
  return absl::OkStatus();
}

absl::Status HostBackend::Append(const StepBatch& batch, std::uint32_t layer,
                                 std::span<const std::byte> key, std::span<const std::byte> value) {
  const BoundModel& model = batch.model();
  const shm::LaneLayout& layout = model.layout();
  const std::size_t row = model.row_bytes(layer);
  const std::size_t token = model.token_bytes(layer);
  for (const StepItem& item : batch.items()) {
    std::byte* const region = item.sequence->tail.region;
    for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
      const shm::TailRing ring = layout.ring(region, layer, head);
      std::size_t at = item.first_row * token + head * row;
      for (std::uint32_t i = 0; i < item.new_tokens; ++i, at += token) {
        shm::StoreRow(ring, item.base + i, key.data() + at, value.data() + at);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status HostBackend::Attend(const StepBatch& batch, std::uint32_t layer,
                                 const StepTensors& tensors) {
  const BoundModel& model = batch.model();
  const shm::LaneLayout& layout = model.layout();
  const kernels::LayerGeometry& geometry = model.geometry(layer);
  const std::size_t query_token = geometry.query_heads * model.row_bytes(layer);
  const std::size_t output_token =
      std::size_t{geometry.query_heads} * geometry.head_dim * ElementBytes(tensors.output_type);
  const std::optional<kernels::SelectionRule> named = RuleOf(tensors);
  const kernels::AttendBatch whole = {.geometry = geometry,
                                      .causal = tensors.causal,
                                      .output_type = ToKernels(tensors.output_type)};
  items_.Clear();
  for (const StepItem& item : batch.items()) {
    const kernels::SelectionRule* const selection = RuleOf(item, layer, named);
    const std::uint64_t end = item.base + (batch.appended(layer) ? item.new_tokens : 0);
    float* const lse =
        tensors.lse.empty() ? nullptr : tensors.lse.data() + item.first_row * geometry.query_heads;
    for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
      kernels::LaneView& lane = item.sequence->resolved.lanes[layout.lane(layer, head)];
      lane.tail.end = end;
      items_.Add(whole, {.lane = &lane,
                         .kv_head = head,
                         .queries = item.new_tokens,
                         .first_query_position = item.first_query_position,
                         .query = tensors.query.data() + item.first_row * query_token,
                         .output = tensors.output.data() + item.first_row * output_token,
                         .lse = lse,
                         .selection = selection});
    }
  }
  const kernels::LaneView* at = nullptr;  // the lane at fault
  items_.ForEachBatch(
      whole,
      [&](const kernels::AttendBatch& part) {
        const kernels::AttendResult result = Run(part);
        if (result.status != kernels::AttendStatus::kOk) at = part.items[result.item].lane;
        return result.status == kernels::AttendStatus::kOk;
      },
      [](bool good) { return good; });
  if (at == nullptr) return absl::OkStatus();
  const auto whose =
      std::find_if(batch.items().begin(), batch.items().end(), [&](const auto& item) {
        const std::vector<kernels::LaneView>& lanes = item.sequence->resolved.lanes;
        return at >= lanes.data() && at < lanes.data() + lanes.size();
      });
  TESSERA_CHECK(whose != batch.items().end(), "the lane at fault is one of the step's");
  return absl::DataLossError(Concat(whose->sequence->id.ToString(), ", layer ", layer));
}

kernels::AttendResult HostBackend::Run(const kernels::AttendBatch& batch) {
  const kernels::AttendResult result =
      kernels::Attend(implementation_, batch, {workspace_.get(), workspace_bytes_}, executor_);
  if (result.status != kernels::AttendStatus::kWorkspaceTooSmall) return result;
  // Twice the need: lanes grow, and steady decoding must not allocate again and again.
  workspace_bytes_ = std::bit_ceil(2 * kernels::AttendWorkspaceBytes(batch));
  workspace_.reset(
      static_cast<std::byte*>(std::aligned_alloc(kWorkspaceAlignment, workspace_bytes_)));
  TESSERA_CHECK(workspace_ != nullptr, Concat("no memory for ", workspace_bytes_, " bytes"));
  return kernels::Attend(implementation_, batch, {workspace_.get(), workspace_bytes_}, executor_);
}

}  // namespace tessera::client
