#include "client/sequence/bulk_append.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "client/error/error_info.h"
#include "client/mapped/mapped_memory.h"
#include "client/session/tensor_carrier.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

// Whether the outcome of a call that failed like this is unknown.
bool IsUncertain(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status) ||
         absl::IsCancelled(status) || absl::IsUnknown(status);
}

// One running bulk append.
class Bulk {
 public:
  Bulk(Session& session, SequenceState& sequence, const AppendTensors& tensors,
       std::uint32_t layers)
      : session_(session),
        sequence_(sequence),
        tensors_(tensors),
        layers_(layers),
        token_bytes_(sequence.model->token_bytes(tensors.first_layer)) {}

  absl::Status Run() {
    absl::StatusOr<PieceShape> shape = Shape();
    if (!shape.ok()) return shape.status();
    for (std::uint32_t layer = 0; layer < layers_; layer += shape->layers) {
      const std::uint32_t layers = std::min(shape->layers, layers_ - layer);
      for (std::uint64_t token = 0; token < tensors_.tokens; token += shape->tokens) {
        const std::uint64_t tokens = std::min(shape->tokens, tensors_.tokens - token);
        const Piece piece = {layer, layers, token, tokens};
        if (absl::Status status = Send(piece); !status.ok()) return status;
        sequence_.Grow(tensors_.first_layer + layer, layers, tokens);
      }
    }
    return absl::OkStatus();
  }

 private:
  struct Piece {
    std::uint32_t layer;  // from tensors_.first_layer
    std::uint32_t layers;
    std::uint64_t token;  // relative to the first token of the tensors
    std::uint64_t tokens;
  };

  absl::StatusOr<PieceShape> Shape() {
    std::uint64_t most = session_.welcome().max_message_bytes();
    most -= std::min(most, kMessageOverhead);
    if (MappedMemory* mapped = session_.mapped_memory()) {
      absl::StatusOr<StagingRing*> staging = mapped->staging();
      if (staging.ok()) {
        staging_ = *staging;
        // Half of the arena: one piece is copied in while the daemon reads another.
        most = staging_->bytes() / 2;
      } else if (!absl::IsNotFound(staging.status()) &&
                 !absl::IsResourceExhausted(staging.status())) {
        return staging.status();
      }
    }
    const PieceShape shape = ShapePieces(layers_, tensors_.tokens, token_bytes_, most);
    if (shape.tokens != 0) return shape;
    return absl::ResourceExhaustedError(Concat(
        "K and V of one token of one layer have ", 2 * token_bytes_, " bytes; ",
        staging_ != nullptr ? "half of the staging arena has " : "the largest message has ", most));
  }

  absl::Status Send(const Piece& piece) {
    v1::AppendRequest request;
    v1::AppendResponse response;
    request.set_sequence_id(sequence_.id.value());
    request.set_first_layer(tensors_.first_layer + piece.layer);
    request.set_layers(piece.layers);
    request.set_first_token(sequence_.TokensOf(tensors_.first_layer + piece.layer));
    request.set_end_of_prompt(tensors_.end_of_prompt && IsLast(piece));
    request.set_position_shift(sequence_.position_shift);
    for (v1::Tensor* tensor : {request.mutable_key(), request.mutable_value()}) {
      const kernels::LayerGeometry& geometry = sequence_.model->geometry(tensors_.first_layer);
      tensor->set_dtype(ToDType(sequence_.model->type()));
      tensor->add_shape(piece.layers);
      tensor->add_shape(piece.tokens);
      tensor->add_shape(geometry.kv_heads);
      tensor->add_shape(geometry.head_dim);
    }
    const std::uint64_t bytes = piece.layers * piece.tokens * token_bytes_;
    StagingRing::Place place;  // returned when the call has finished
    if (staging_ != nullptr) {
      absl::StatusOr<StagingRing::Place> taken = staging_->Take(2 * bytes);
      if (!taken.ok()) return Lost(taken.status());
      place = *std::move(taken);
      GateHold hold(session_.mapped_memory()->gate(), Gate::kSharedLane);
      if (!hold) return session_.status();
      absl::Status copied =
          session_.mapped_memory()->CopyToStaging(List(piece, place.offset(), bytes));
      if (!copied.ok()) return copied;
      SetStaging(*request.mutable_key(), place.offset(), bytes);
      SetStaging(*request.mutable_value(), place.offset() + bytes, bytes);
    } else {
      std::string* const key = request.mutable_key()->mutable_inline_();
      std::string* const value = request.mutable_value()->mutable_inline_();
      key->resize(bytes);
      value->resize(bytes);
      Copy(piece, tensors_.key, reinterpret_cast<std::byte*>(key->data()));
      Copy(piece, tensors_.value, reinterpret_cast<std::byte*>(value->data()));
    }
    return session_.Call(request, response);
  }

  // The staging arena closes with the lease, whose status has the reason.
  absl::Status Lost(const absl::Status& status) const {
    const absl::Status reason = session_.status();
    return reason.ok() ? status : reason;
  }

  // Whether it is the last piece of its layers.
  bool IsLast(const Piece& piece) const { return piece.token + piece.tokens == tensors_.tokens; }

  // Gathers the piece's [layers][tokens] from the caller's [layers][all tokens].
  void Copy(const Piece& piece, std::span<const std::byte> from, std::byte* to) const {
    const std::uint64_t run = piece.tokens * token_bytes_;
    for (std::uint32_t i = 0; i < piece.layers; ++i) {
      const std::uint64_t first = (piece.layer + i) * tensors_.tokens + piece.token;
      std::memcpy(to + i * run, from.data() + first * token_bytes_, run);
    }
  }

  // Lists the same copies: K to `offset` of the staging arena, and V `bytes` after it.
  std::span<const MappedMemory::StagingCopy> List(const Piece& piece, std::uint64_t offset,
                                                  std::uint64_t bytes) {
    const std::uint64_t run = piece.tokens * token_bytes_;
    copies_.clear();
    for (const bool of_value : {false, true}) {
      const std::span<const std::byte> from = of_value ? tensors_.value : tensors_.key;
      for (std::uint32_t i = 0; i < piece.layers; ++i) {
        const std::uint64_t first = (piece.layer + i) * tensors_.tokens + piece.token;
        copies_.push_back(
            {offset + (of_value ? bytes : 0) + i * run, from.data() + first * token_bytes_, run});
      }
    }
    return copies_;
  }

  static void SetStaging(v1::Tensor& tensor, std::uint64_t offset, std::uint64_t bytes) {
    tensor.mutable_staging()->set_offset(offset);
    tensor.mutable_staging()->set_bytes(bytes);
  }

  Session& session_;
  SequenceState& sequence_;
  const AppendTensors& tensors_;
  const std::uint32_t layers_;
  const std::uint64_t token_bytes_;
  StagingRing* staging_ = nullptr;
  std::vector<MappedMemory::StagingCopy> copies_;
};

absl::StatusOr<std::uint32_t> CheckLayers(const BoundModel& model, const AppendTensors& tensors) {
  if (tensors.first_layer >= model.layers()) {
    return absl::InvalidArgumentError(Concat("first_layer is ", tensors.first_layer,
                                             "; the model has ", model.layers(), " layers"));
  }
  const std::uint32_t left = model.layers() - tensors.first_layer;
  const std::uint32_t layers = tensors.layers == 0 ? left : tensors.layers;
  if (layers > left) {
    return absl::InvalidArgumentError(Concat(layers, " layers from first_layer ",
                                             tensors.first_layer, "; the model has ",
                                             model.layers()));
  }
  const kernels::LayerGeometry& first = model.geometry(tensors.first_layer);
  for (std::uint32_t i = tensors.first_layer + 1; i < tensors.first_layer + layers; ++i) {
    const kernels::LayerGeometry& other = model.geometry(i);
    if (other.kv_heads != first.kv_heads || other.head_dim != first.head_dim) {
      return absl::InvalidArgumentError(Concat("layers ", tensors.first_layer, " and ", i,
                                               " differ in kv_heads or head_dim; append them "
                                               "separately"));
    }
  }
  return layers;
}

absl::Status CheckBytes(std::string_view what, std::size_t given, const BoundModel& model,
                        const AppendTensors& tensors, std::uint32_t layers) {
  const kernels::LayerGeometry& geometry = model.geometry(tensors.first_layer);
  std::uint64_t wanted = layers * model.token_bytes(tensors.first_layer);
  if (__builtin_mul_overflow(wanted, tensors.tokens, &wanted) || given != wanted) {
    return absl::InvalidArgumentError(
        Concat(what, " has ", given, " bytes; expected are [", layers, " layers][", tensors.tokens,
               " tokens][", geometry.kv_heads, " kv heads][", geometry.head_dim, "] of ",
               kernels::ElementName(model.type()), ": ", wanted));
  }
  return absl::OkStatus();
}

// Removes the pieces that were appended before one failed.
absl::Status RollBack(Session& session, SequenceState& sequence, std::uint64_t tokens,
                      const absl::Status& failed) {
  const absl::Status truncated = TruncateTo(session, sequence.id, tokens);
  if (truncated.ok()) {
    sequence.SetTokens(tokens);
    return failed;
  }
  sequence.uncertain = true;
  return WithMessage(failed, Concat(AsStringView(failed.message()),
                                    "; the pieces appended before could not be removed: ",
                                    AsStringView(truncated.message())));
}

}  // namespace

PieceShape ShapePieces(std::uint32_t layers, std::uint64_t tokens, std::uint64_t token_bytes,
                       std::uint64_t most) {
  if (const std::uint64_t fit = most / (2 * token_bytes * layers); fit > 0) {
    return {layers, std::min(tokens, fit)};
  }
  return {1, std::min(tokens, most / (2 * token_bytes))};
}

absl::Status RefreshTokens(Session& session, SequenceState& sequence) {
  v1::DescribeRequest request;
  v1::DescribeResponse response;
  request.set_sequence_id(sequence.id.value());
  request.set_lanes(true);
  if (absl::Status status = session.Call(request, response); !status.ok()) return status;
  sequence.position_shift = response.position_shift();
  std::vector<std::uint64_t> layers(sequence.model->layers(), response.tokens());
  for (const v1::LaneDescription& lane : response.lane()) {
    if (lane.kv_head() != 0 || lane.layer() >= layers.size()) continue;
    std::uint64_t& held = layers[lane.layer()];
    held = std::max(held, lane.tokens() + lane.tail_entries());
  }
  sequence.SetLayers(response.tokens(), std::move(layers));
  sequence.uncertain = false;
  return absl::OkStatus();
}

absl::Status LearnPositionShift(Session& session, SequenceState& sequence,
                                const absl::Status& refused) {
  if (!absl::IsFailedPrecondition(refused)) return refused;
  v1::DescribeRequest request;
  v1::DescribeResponse response;
  request.set_sequence_id(sequence.id.value());
  if (!session.Call(request, response).ok()) return refused;
  if (sequence.position_shift == response.position_shift()) return refused;
  sequence.position_shift = response.position_shift();
  return absl::FailedPreconditionError(
      Concat(AsStringView(refused.message()),
             ": another caller has compressed the sequence; read next_position() again"));
}

absl::Status TruncateTo(Session& session, SequenceId sequence, std::uint64_t tokens) {
  v1::TruncateRequest request;
  v1::TruncateResponse response;
  request.set_sequence_id(sequence.value());
  request.set_tokens(tokens);
  return session.Call(request, response);
}

absl::Status CutAbandonedRows(Session& session, SequenceState& sequence) {
  if (!sequence.abandoned_rows) return absl::OkStatus();
  absl::Status status = TruncateTo(session, sequence.id, sequence.tokens);
  sequence.abandoned_rows = !status.ok();
  return status;
}

absl::Status CutBeforeReading(Session& session, const std::shared_ptr<SequenceState>& sequence) {
  if (!sequence->abandoned_rows) return absl::OkStatus();
  absl::StatusOr<SequenceUse> use = SequenceUse::Take(sequence);
  return use.ok() ? CutAbandonedRows(session, *sequence) : use.status();
}

absl::StatusOr<std::uint64_t> BulkAppend(Session& session, SequenceState& sequence,
                                         const AppendTensors& tensors) {
  const BoundModel& model = *sequence.model;
  if (tensors.tokens == 0) {
    return absl::InvalidArgumentError("tokens is 0; append at least 1");
  }
  absl::StatusOr<std::uint32_t> layers = CheckLayers(model, tensors);
  if (!layers.ok()) return layers.status();
  absl::Status status = CheckBytes("key", tensors.key.size(), model, tensors, *layers);
  if (status.ok()) status = CheckBytes("value", tensors.value.size(), model, tensors, *layers);
  if (status.ok()) status = CutAbandonedRows(session, sequence);
  if (status.ok() && sequence.uncertain) status = RefreshTokens(session, sequence);
  if (!status.ok()) return status;

  const std::uint64_t before = sequence.tokens;
  const bool was_even = sequence.layer_tokens.empty();
  const std::uint64_t first_before = sequence.TokensOf(tensors.first_layer);
  sequence.tail = Tail();  // the daemon absorbs and closes it, even if the append fails
  status = Bulk(session, sequence, tensors, *layers).Run();
  if (status.ok()) {
    sequence.prompt_waits = true;
    return sequence.tokens;
  }
  if (IsUncertain(status)) sequence.uncertain = true;
  status = LearnPositionShift(session, sequence, status);
  const std::uint64_t first_now = sequence.TokensOf(tensors.first_layer);
  if (first_now == first_before || sequence.uncertain || absl::IsDataLoss(status)) return status;
  if (was_even) return RollBack(session, sequence, before, status);
  // Truncation would also cut layers that held more tokens before.
  return WithMessage(status, Concat(AsStringView(status.message()), "; layer ", tensors.first_layer,
                                    " now holds ", first_now, " tokens"));
}

}  // namespace tessera::client
