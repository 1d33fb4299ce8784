// The RPCs of MappedDaemon that carry tensors.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "daemon/base/strings.h"
#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"
#include "tests/fakes/daemon/mapped_daemon_transport.h"

namespace tessera::fakes {

using kernels::kTileEntries;

absl::StatusOr<const std::byte*> MappedDaemon::Bytes(const v1::Tensor& tensor, Session& session,
                                                     std::uint64_t bytes) {
  if (tensor.has_staging()) {
    const v1::StagingRef& ref = tensor.staging();
    if (ref.bytes() != bytes || ref.offset() > options_.staging_bytes ||
        bytes > options_.staging_bytes - ref.offset()) {
      return absl::OutOfRangeError("outside the staging arena");
    }
    return session.staging_mapping.data() + ref.offset();
  }
  if (tensor.inline_().size() != bytes) return absl::InvalidArgumentError("wrong size");
  return reinterpret_cast<const std::byte*>(tensor.inline_().data());
}

absl::Status MappedDaemon::Append(const v1::AppendRequest& request, v1::AppendResponse& response) {
  absl::StatusOr<std::shared_ptr<Session>> session = Find(request.session());
  if (!session.ok()) return session.status();
  if (request.ByteSizeLong() > options_.max_message_bytes) {
    return absl::ResourceExhaustedError("the message is too large");
  }
  absl::StatusOr<Sequence*> found = FindSequence(request.sequence_id());
  if (!found.ok()) return found.status();
  Sequence& sequence = **found;
  if (!sequence.failure.empty()) return absl::FailedPreconditionError(sequence.failure);
  CloseTail(sequence);
  if (!fail_append_.ok() && fail_append_after_-- == 0) {
    return std::exchange(fail_append_, absl::OkStatus());
  }
  const shm::LaneLayout& layout = sequence.model->layout;
  const std::uint32_t heads = layout.kv_heads(request.first_layer());
  const std::size_t row = layout.tile(request.first_layer()).row_bytes();
  const std::uint64_t tokens = request.key().shape(1);
  const std::uint64_t bytes = request.layers() * tokens * heads * row;
  absl::StatusOr<const std::byte*> key = Bytes(request.key(), **session, bytes);
  if (!key.ok()) return key.status();
  absl::StatusOr<const std::byte*> value = Bytes(request.value(), **session, bytes);
  if (!value.ok()) return value.status();
  for (std::uint32_t i = 0; i < request.layers(); ++i) {
    const Lane& lane = sequence.lanes[layout.lane(request.first_layer() + i, 0)];
    if (lane.tokens != request.first_token()) {
      return absl::OutOfRangeError(Concat("layer ", request.first_layer() + i, " holds ",
                                          lane.tokens, ", first_token is ", request.first_token()));
    }
  }
  for (std::uint32_t i = 0; i < request.layers(); ++i) {
    for (std::uint64_t token = 0; token < tokens; ++token) {
      for (std::uint32_t head = 0; head < heads; ++head) {
        Lane& lane = sequence.lanes[layout.lane(request.first_layer() + i, head)];
        const std::size_t at = ((i * tokens + token) * heads + head) * row;
        lane.keys.insert(lane.keys.end(), *key + at, *key + at + row);
        lane.values.insert(lane.values.end(), *value + at, *value + at + row);
        lane.tokens = request.first_token() + token + 1;
      }
    }
  }
  Publish(sequence);
  appends_.fetch_add(1);
  staged_appends_.fetch_add(request.key().has_staging());
  response.set_tokens(TokensLocked(sequence));
  return absl::OkStatus();
}

absl::Status MappedDaemon::Attend(const v1::AttendRequest& request, v1::AttendResponse& response) {
  absl::StatusOr<std::shared_ptr<Session>> session = Find(request.session());
  if (!session.ok()) return session.status();
  if (request.ByteSizeLong() > options_.max_message_bytes) {
    return absl::ResourceExhaustedError("the message is too large");
  }
  for (const v1::AttendItem& asked : request.items()) {
    absl::StatusOr<Sequence*> found = FindSequence(asked.sequence_id());
    if (!found.ok()) return found.status();
    Sequence& sequence = **found;
    const v1::LayerGeometry& stated =
        sequence.model->geometry.layers(static_cast<int>(request.layer()));
    const kernels::DenseTile tile = sequence.model->layout.tile(request.layer());
    const std::vector<float> sinks(stated.sinks().begin(), stated.sinks().end());
    const auto output_type = static_cast<kernels::ElementType>(request.output_dtype());
    const kernels::LayerGeometry geometry = {
        .query_heads = stated.query_heads(),
        .kv_heads = stated.kv_heads(),
        .head_dim = stated.head_dim(),
        .type = tile.type,
        .scale = stated.scale() != 0 ? stated.scale()
                                     : 1.0f / std::sqrt(static_cast<float>(stated.head_dim())),
        .sliding_window = stated.sliding_window(),
        .logit_softcap = stated.logit_softcap(),
        .sinks = sinks.empty() ? nullptr : sinks.data()};
    const auto queries = static_cast<std::uint32_t>(asked.query().shape(0));
    v1::AttendOutput& output = *response.add_outputs();
    output.mutable_output()->mutable_inline_()->resize(std::size_t{queries} * geometry.query_heads *
                                                       geometry.head_dim *
                                                       kernels::ElementBytes(output_type));
    output.mutable_lse()->Resize(static_cast<int>(queries * geometry.query_heads), 0.0f);
    for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
      const Lane& lane = sequence.lanes[sequence.model->layout.lane(request.layer(), head)];
      std::vector<std::uint64_t> blocks;
      const std::uint64_t table = WriteSegment(lane, tile, 0, lane.tokens, blocks);
      const kernels::SegmentView segment = {
          .arena = pool_->at(0),
          .arena_bytes = pool_->limit_bytes(),
          .tile_offsets = reinterpret_cast<const std::uint64_t*>(pool_->at(table)),
          .first_position = 0,
          .entries = static_cast<std::uint32_t>(lane.tokens),
          .shape = kernels::DenseShape(tile.head_dim, tile.type)};
      const kernels::LaneView view = {.segments = &segment,
                                      .segment_count = lane.tokens == 0 ? 0u : 1u};
      const kernels::AttendItem item = {
          .lane = &view,
          .kv_head = head,
          .queries = queries,
          .first_query_position = asked.has_first_query_position()
                                      ? asked.first_query_position()
                                      : std::max<std::uint64_t>(lane.tokens, queries) - queries,
          .query = asked.query().inline_().data(),
          .output = output.mutable_output()->mutable_inline_()->data(),
          .lse = output.mutable_lse()->mutable_data()};
      const kernels::AttendBatch batch = {.geometry = geometry,
                                          .causal = !request.non_causal(),
                                          .output_type = output_type,
                                          .items = {&item, 1}};
      const std::size_t bytes = (kernels::AttendWorkspaceBytes(batch) + 63) / 64 * 64;
      std::unique_ptr<std::byte, void (*)(void*)> workspace(
          static_cast<std::byte*>(std::aligned_alloc(64, bytes)), std::free);
      kernels::InlineExecutor executor;
      const kernels::AttendResult result =
          kernels::Attend(kernels::BestImplementation(), batch, {workspace.get(), bytes}, executor);
      TESSERA_CHECK(result.status == kernels::AttendStatus::kOk, "attention over the fake's rows");
      for (std::uint64_t offset : blocks) pool_->Free(offset);
    }
  }
  return absl::OkStatus();
}

absl::Status MappedDaemon::Observe(v1::ObserveRequest request, v1::ObserveResponse& response) {
  response.set_norms_from(settled_before_);
  if (!options_.needs.has_value()) return absl::FailedPreconditionError("nothing is asked for");
  absl::StatusOr<std::shared_ptr<Session>> session = Find(request.session());
  if (!session.ok()) return session.status();
  for (v1::Tensor* tensor : {request.mutable_last_queries(), request.mutable_norm_queries(),
                             request.mutable_attention_sums()}) {
    if (!tensor->has_staging()) continue;
    const std::uint64_t bytes = tensor->staging().bytes();
    const absl::StatusOr<const std::byte*> data = Bytes(*tensor, **session, bytes);
    if (!data.ok()) return data.status();
    tensor->set_inline_(reinterpret_cast<const char*>(*data), bytes);
    staged_tensors_.fetch_add(1);
  }
  observed_.push_back(std::move(request));
  return absl::OkStatus();
}

std::vector<v1::ObserveRequest> MappedDaemon::TakeObserved() {
  std::lock_guard lock(mutex_);
  return std::exchange(observed_, {});
}

absl::Status MappedDaemon::Describe(const v1::DescribeRequest& request,
                                    v1::DescribeResponse& response) {
  absl::StatusOr<std::shared_ptr<Session>> session = Find(request.session());
  if (!session.ok()) return session.status();
  absl::StatusOr<Sequence*> found = FindSequence(request.sequence_id());
  if (!found.ok()) return found.status();
  const Sequence& sequence = **found;
  response.set_sequence_id(sequence.id);
  response.set_model_id(sequence.model->id);
  response.set_owner_session_id(sequence.owner);
  response.set_state(sequence.failure.empty() ? v1::SEQUENCE_STATE_LIVE
                                              : v1::SEQUENCE_STATE_FAILED);
  response.set_failure(sequence.failure);
  response.set_tokens(CommittedLocked(sequence));
  response.set_decoding(sequence.tail.has_value());
  response.set_directory_offset(sequence.block);
  for (std::uint32_t layer = 0; layer < sequence.model->layout.layers(); ++layer) {
    v1::LaneDescription& lane = *response.add_lane();
    lane.set_layer(layer);
    const std::uint64_t held = sequence.lanes[sequence.model->layout.lane(layer, 0)].tokens;
    lane.set_entries(held);
    lane.set_tail_entries(sequence.tail.has_value() ? CommittedLocked(sequence) - held : 0);
  }
  return absl::OkStatus();
}

}  // namespace tessera::fakes
