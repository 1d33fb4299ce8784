#include "client/step/remote_step.h"

#include <utility>
#include <vector>

#include "client/sequence/bulk_append.h"
#include "client/session/kernel_types.h"
#include "client/step/attend_rpc.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

void FillTensor(v1::Tensor& tensor, const BoundModel& model, std::uint32_t layer,
                std::uint32_t tokens, std::span<const std::byte> bytes) {
  tensor.set_dtype(ToDType(model.type()));
  tensor.add_shape(1);
  tensor.add_shape(tokens);
  tensor.add_shape(model.geometry(layer).kv_heads);
  tensor.add_shape(model.geometry(layer).head_dim);
  tensor.set_inline_(bytes.data(), bytes.size());
}

}  // namespace

absl::Status RemoteStep::Begin(std::span<Sequence* const> sequences, const StepOptions& options) {
  absl::Status status = batch_.Take(sequences, options);
  if (!status.ok()) return status;
  for (const StepItem& item : batch_.items()) {
    if (status.ok()) status = CutAbandonedRows(*session_, *item.sequence);
    if (!item.sequence->layer_tokens.empty()) {
      status = absl::FailedPreconditionError(
          Concat("the layers of ", item.sequence->id.ToString(),
                 " hold different numbers of tokens; append the missing layers before decoding"));
    }
  }
  if (!status.ok()) {
    batch_.Release();
    return status;
  }
  open_ = true;
  return absl::OkStatus();
}

absl::Status RemoteStep::Append(std::uint32_t layer, std::span<const std::byte> key,
                                std::span<const std::byte> value) {
  if (absl::Status status = batch_.CheckAppend(layer, key, value); !status.ok()) return status;
  touched_ = true;
  for (const StepItem& item : batch_.items()) {
    const std::size_t token = batch_.model().token_bytes(layer);
    const std::size_t first = item.first_row * token;
    const std::size_t bytes = item.new_tokens * token;
    absl::Status status =
        AppendItem(item, layer, key.subspan(first, bytes), value.subspan(first, bytes));
    if (status.ok()) continue;
    status = LearnPositionShift(*session_, *item.sequence, status);
    // Some sequences hold the layer and others do not, so nothing of the step can be committed.
    Abandon();
    return status;
  }
  batch_.MarkAppended(layer);
  return absl::OkStatus();
}

absl::Status RemoteStep::AppendItem(const StepItem& item, std::uint32_t layer,
                                    std::span<const std::byte> key,
                                    std::span<const std::byte> value) {
  v1::AppendRequest request;
  v1::AppendResponse response;
  request.set_sequence_id(item.sequence->id.value());
  request.set_first_layer(layer);
  request.set_layers(1);
  request.set_first_token(item.base);
  request.set_decoded(true);
  request.set_position_shift(item.sequence->position_shift);
  FillTensor(*request.mutable_key(), batch_.model(), layer, item.new_tokens, key);
  FillTensor(*request.mutable_value(), batch_.model(), layer, item.new_tokens, value);
  return session_->Call(request, response);
}

absl::Status RemoteStep::Attend(std::uint32_t layer, const StepTensors& tensors) {
  absl::Status status = batch_.CheckAttend(layer, tensors);
  if (!status.ok()) return status;
  status = batch_.Observe(layer, tensors.query, StepBatch::QueryRows::kAll);
  if (!status.ok()) return status;
  const std::vector<AttendRow> rows = batch_.Rows(layer, tensors);
  return AttendByRpc(*session_, {.model = &batch_.model(),
                                 .layer = layer,
                                 .output_type = ToKernels(tensors.output_type),
                                 .causal = tensors.causal,
                                 .selection = RuleOf(tensors),
                                 .rows = rows});
}

absl::Status RemoteStep::AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) {
  if (absl::Status status = batch_.CheckAttend(layer, tensors); !status.ok()) return status;
  absl::Status status = Append(layer, tensors.key, tensors.value);
  return status.ok() ? Attend(layer, tensors) : status;
}

absl::Status RemoteStep::TruncateItem(StepItem& item, std::uint64_t tokens) {
  return TruncateTo(*session_, item.sequence->id, tokens);
}

absl::Status RemoteStep::End(std::span<const std::uint32_t> accepted) {
  if (absl::Status status = batch_.CheckEnd(accepted); !status.ok()) return status;
  for (std::size_t i = 0; i < accepted.size(); ++i) {
    StepItem& item = batch_.items()[i];
    if (accepted[i] == item.new_tokens) continue;
    absl::Status status = TruncateItem(item, item.base + accepted[i]);
    if (!status.ok()) {
      Abandon();
      return status;
    }
  }
  for (std::size_t i = 0; i < batch_.items().size(); ++i) {
    StepItem& item = batch_.items()[i];
    item.sequence->SetTokens(item.base + (accepted.empty() ? item.new_tokens : accepted[i]));
  }
  touched_ = false;
  open_ = false;
  batch_.Release();
  return absl::OkStatus();
}

void RemoteStep::Abandon() {
  batch_.ForgetRows();
  if (std::exchange(touched_, false)) {
    for (StepItem& item : batch_.items()) {
      // If this fails, for example in a full pool, the next call on the sequence does it.
      item.sequence->abandoned_rows = !TruncateItem(item, item.base).ok();
    }
  }
  open_ = false;
  batch_.Release();
}

}  // namespace tessera::client
