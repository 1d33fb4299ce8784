#include "client/sequence/compression.h"

#include <utility>

#include "client/mapped/mapped_memory.h"
#include "client/sequence/sequence_state.h"
#include "client/session/kernel_types.h"
#include "client/session/tensor_carrier.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

static_assert(static_cast<int>(ValueType::kFp8) == v1::VALUE_TYPE_FP8);
static_assert(static_cast<int>(Summary::kSigns) == v1::BLOCK_SUMMARY_SIGNS);

void FillPacking(const Packing& packing, v1::CompressRequest& request) {
  request.set_first_layer(packing.first_layer);
  request.set_layers(packing.layers);
  v1::Packing& out = *request.mutable_packing();
  out.set_summary(static_cast<v1::BlockSummary>(packing.summary));
  out.set_block(packing.block);
  out.set_dense(packing.dense);
  out.set_kept_channels(packing.kept_channels);
  out.set_channels(packing.channels);
  // Fields that dense rows do not have remain unset, so that their defaults do not contradict.
  if (packing.dense) return;
  out.set_group(packing.group);
  out.set_values(static_cast<v1::ValueType>(packing.values));
}

// Sets shapes and types; the bytes travel through the arena or inside the message.
absl::Status FillShapes(const BoundModel& model, const Packing& packing,
                        const RotationTensors& rotations, v1::CompressRequest& request) {
  if (packing.first_layer >= model.layers()) {
    return absl::InvalidArgumentError(Concat("first_layer is ", packing.first_layer,
                                             "; the model has ", model.layers(), " layers"));
  }
  const kernels::LayerGeometry& geometry = model.geometry(packing.first_layer);
  const std::uint64_t shape[] = {
      packing.layers != 0 ? packing.layers : model.layers() - packing.first_layer,
      geometry.kv_heads, packing.channels != 0 ? packing.channels : geometry.head_dim,
      geometry.head_dim};
  std::uint64_t bytes = ElementBytes(rotations.type);
  for (const std::uint64_t dimension : shape) bytes *= dimension;
  for (const auto& [name, given] : {std::pair{"rotations.key", rotations.key.size()},
                                    std::pair{"rotations.value", rotations.value.size()}}) {
    if (given == bytes) continue;
    return absl::InvalidArgumentError(
        Concat(name, " has ", given, " bytes; expected are [", shape[0], " layers][", shape[1],
               " kv heads][", shape[2], " channels][", shape[3], "] of ",
               kernels::ElementName(ToKernels(rotations.type)), ": ", bytes));
  }
  for (v1::Tensor* tensor :
       {request.mutable_rotations()->mutable_key(), request.mutable_rotations()->mutable_value()}) {
    tensor->set_dtype(ToDType(ToKernels(rotations.type)));
    for (const std::uint64_t dimension : shape) tensor->add_shape(dimension);
  }
  return absl::OkStatus();
}

void FillInline(const RotationTensors& rotations, v1::Rotations& out) {
  out.mutable_key()->set_inline_(rotations.key.data(), rotations.key.size());
  out.mutable_value()->set_inline_(rotations.value.data(), rotations.value.size());
}

absl::Status FillStaging(Session& session, const RotationTensors& rotations,
                         const StagingRing::Place& place, v1::Rotations& out) {
  GateHold hold(session.mapped_memory()->gate(), Gate::kSharedLane);
  if (!hold) return session.status();
  const std::uint64_t bytes = rotations.key.size();
  const MappedMemory::StagingCopy copies[] = {
      {place.offset(), rotations.key.data(), bytes},
      {place.offset() + bytes, rotations.value.data(), bytes}};
  if (absl::Status status = session.mapped_memory()->CopyToStaging(copies); !status.ok())
    return status;
  out.mutable_key()->mutable_staging()->set_offset(place.offset());
  out.mutable_key()->mutable_staging()->set_bytes(bytes);
  out.mutable_value()->mutable_staging()->set_offset(place.offset() + bytes);
  out.mutable_value()->mutable_staging()->set_bytes(bytes);
  return absl::OkStatus();
}

absl::Status TooLarge(const RotationTensors& rotations, std::uint64_t message_bytes) {
  return absl::ResourceExhaustedError(
      Concat("rotations have ", 2 * rotations.key.size(), " bytes; the largest message has ",
             message_bytes,
             ", and they do not fit into a staging arena; compress fewer layers at a time"));
}

}  // namespace

absl::StatusOr<v1::CompressResponse> CompressByRpc(Session& session, const BoundModel& model,
                                                   SequenceId sequence, const Packing& packing,
                                                   const RotationTensors& rotations) {
  v1::CompressRequest request;
  request.set_sequence_id(sequence.value());
  FillPacking(packing, request);
  StagingRing::Place place;  // returned when the call has finished
  if (!rotations.key.empty() || !rotations.value.empty()) {
    absl::Status status = FillShapes(model, packing, rotations, request);
    if (!status.ok()) return status;
    const std::uint64_t bytes = 2 * rotations.key.size();
    const std::uint64_t most = session.welcome().max_message_bytes();
    MappedMemory* const mapped = session.mapped_memory();
    if (bytes + kMessageOverhead <= most) {
      FillInline(rotations, *request.mutable_rotations());
    } else {
      if (mapped == nullptr) return TooLarge(rotations, most);
      absl::StatusOr<StagingRing*> staging = mapped->staging();
      if (!staging.ok() || (*staging)->bytes() < bytes) return TooLarge(rotations, most);
      absl::StatusOr<StagingRing::Place> taken = (*staging)->Take(bytes);
      if (!taken.ok()) return taken.status();
      place = *std::move(taken);
      status = FillStaging(session, rotations, place, *request.mutable_rotations());
      if (!status.ok()) return status;
    }
  }
  v1::CompressResponse response;
  if (absl::Status status = session.Call(request, response); !status.ok()) return status;
  return response;
}

absl::Status CheckRule(const SelectionRule& rule) {
  if (rule.entries != 0 && rule.floor != 0) {
    return absl::InvalidArgumentError(
        Concat("the selection has entries ", rule.entries, " and floor ", rule.floor,
               "; floor limits a budget by rate, so set it to 0 if entries is the budget"));
  }
  if (rule.entries != 0 || (rule.rate > 0 && rule.rate <= 1)) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat("the selection's rate is ", rule.rate,
                                           "; set it above 0 and at most 1, or set entries"));
}

void ToProto(const kernels::SelectionRule& rule, v1::Selection& selection) {
  if (rule.entries != 0) {
    selection.set_entries(rule.entries);
  } else {
    selection.set_rate(rule.rate);
    selection.set_floor(rule.floor);
  }
  selection.set_judge(rule.judge == kernels::SelectionRule::Judge::kLogit
                          ? v1::Selection::JUDGE_LOGIT
                          : v1::Selection::JUDGE_SHARE);
  selection.set_first_block(rule.first_block);
  selection.set_counts_tail(rule.counts_tail);
  selection.set_each_head(rule.each_head);
  selection.set_each_query(rule.each_query);
}

PolicySelection FromProto(const v1::PolicySelection& policy) {
  const v1::Selection& selection = policy.selection();
  using Judge = kernels::SelectionRule::Judge;
  return {.rule = {.rate = selection.entries() != 0 ? 1.0 : selection.rate(),
                   .entries = selection.entries(),
                   .floor = selection.floor(),
                   .judge = selection.judge() == v1::Selection::JUDGE_LOGIT ? Judge::kLogit
                                                                            : Judge::kShare,
                   .first_block = selection.first_block(),
                   .counts_tail = selection.counts_tail(),
                   .each_head = selection.each_head(),
                   .each_query = selection.each_query()},
          .dense_layers = policy.dense_layers()};
}

}  // namespace tessera::client
