// Sends observations to the daemon, layer by layer, in messages of limited size.

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "client/observe/observer.h"
#include "daemon/base/expected_tokens.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

void SetShape(v1::DType type, std::initializer_list<std::uint64_t> shape, v1::Tensor& tensor) {
  tensor.set_dtype(type);
  for (const std::uint64_t dimension : shape) tensor.add_shape(dimension);
}

// Size of one piece of queries.
constexpr std::uint64_t kPieceBytes = 1 << 20;

absl::Status Send(Session& session, std::uint32_t layer, v1::ObserveRequest& request,
                  TensorCarrier& tensors, v1::ObserveResponse& response) {
  absl::Status status =
      tensors.Carry(Concat("layer ", layer, "'s observation"), request.ByteSizeLong());
  if (!status.ok()) return status;
  return session.Call(request, response);
}

}  // namespace

std::uint64_t Observer::HeadRows::known() const {
  if (let_go.empty()) return rows.size();
  return static_cast<std::uint64_t>(
      std::distance(order.upper_bound(let_go.Strongest()), order.end()));
}

std::vector<std::byte> Observer::FillNorms(std::uint32_t index, const Layer& layer,
                                           std::size_t number, bool to_another,
                                           v1::ObserveRequest& request) const {
  if (number >= layer.norms.size()) return {};
  const Strongest& norms = layer.norms[number];
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  std::vector<std::byte> bytes;
  const std::uint64_t wanted = NormsOf(layer.next - layer.from);
  // The rows that are certainly the strongest. The daemon decides whether they are enough: it may
  // need none.
  std::uint64_t known = ~std::uint64_t{0};
  bool all = true;
  for (const HeadRows& head : norms.heads) {
    known = std::min(known, head.known());
    all = all && head.let_go.empty();
  }
  std::uint64_t count = std::min(known, wanted);
  if (to_another) count = std::max(count, std::min(known, NormsOf(ExpectedTokens(layer.next))));
  for (const HeadRows& head : norms.heads) {
    all = all && head.rows.size() == count;
    std::vector<std::uint64_t> strongest;
    for (auto it = head.order.rbegin(); strongest.size() < count; ++it) {
      strongest.push_back(~it->second);
    }
    std::sort(strongest.begin(), strongest.end());
    for (const std::uint64_t position : strongest) {
      request.add_norm_positions(position);
      const std::vector<std::byte>& row = head.rows.at(position).row;
      bytes.insert(bytes.end(), row.begin(), row.end());
    }
  }
  if (!bytes.empty()) {
    SetShape(ToDType(geometry.type), {geometry.query_heads, count, geometry.head_dim},
             *request.mutable_norm_queries());
    request.set_all_norms(all);
  }
  // Also if no row is known: the daemon must not decide as if there were none.
  request.set_first_norm_token(norms.first);
  request.set_norm_token_end(norms.end);
  return bytes;
}

absl::StatusOr<std::uint32_t> Observer::Show(Session& session, SequenceId sequence,
                                             std::uint32_t first, std::uint32_t end,
                                             std::uint64_t tokens, bool to_another) {
  if (absl::Status status = SendTokenIds(session, sequence, tokens); !status.ok()) return status;
  const auto layers_end = layers_.lower_bound(end);
  for (auto it = layers_.lower_bound(first); it != layers_end; ++it) {
    const kernels::LayerGeometry& geometry = model_->geometry(it->first);
    KeepLast(MostLast(it->second, it->second.next), geometry.query_heads * RowBytes(geometry),
             it->second);
    absl::StatusOr<v1::ObserveResponse> answer =
        SendLayer(session, sequence, it->first, it->second, to_another);
    const std::uint64_t from = answer.ok() ? answer->norms_from() : 0;
    const auto begins_within = [from](const Strongest& norms) {
      return norms.first < from && from < norms.end;
    };
    if (std::ranges::any_of(it->second.norms, begins_within)) {
      // Some of these tokens have been decided in the meantime: send the strongest of the rest.
      it->second.ForgetNormsBefore(from);
      answer = SendLayer(session, sequence, it->first, it->second, to_another);
    }
    const absl::Status& status = answer.status();
    if (absl::IsResourceExhausted(status) && it->first > first) return it->first;
    if (!status.ok()) return status;
    // A Compress that failed in another layer, or one by an operator, has decided: rows observed
    // again count as later ones.
    if (answer->decided_tokens() > 0) decided_.insert(it->first);
  }
  return end;
}

absl::Status Observer::SendTokenIds(Session& session, SequenceId sequence, std::uint64_t tokens) {
  const std::uint64_t count =
      std::min<std::uint64_t>(ids_.size(), tokens - std::min(tokens, first_id_));
  if (count == 0) return absl::OkStatus();
  const auto end = ids_.begin() + static_cast<std::ptrdiff_t>(count);
  v1::ObserveRequest request;
  request.set_sequence_id(sequence.value());
  request.set_first_token_id(first_id_);
  request.mutable_token_ids()->Add(ids_.begin(), end);
  v1::ObserveResponse response;
  if (absl::Status status = session.Call(request, response); !status.ok()) return status;
  ids_.erase(ids_.begin(), end);
  first_id_ += count;
  return absl::OkStatus();
}

absl::StatusOr<v1::ObserveResponse> Observer::SendLayer(Session& session, SequenceId sequence,
                                                        std::uint32_t index, const Layer& layer,
                                                        bool to_another) const {
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  const std::uint64_t rows = layer.last.size() / (geometry.query_heads * RowBytes(geometry));
  std::uint64_t sent = 0;
  v1::ObserveResponse response;
  absl::Status status = SendFirstPiece(session, sequence, index, layer, to_another, sent, response);
  while (status.ok() && sent < rows) {
    v1::ObserveRequest more;
    more.set_sequence_id(sequence.value());
    more.set_layer(index);
    TensorCarrier tensors(session);
    sent += FillLast(geometry, layer, sent, more, tensors);
    v1::ObserveResponse nothing;
    status = Send(session, index, more, tensors, nothing);
  }
  for (std::size_t number = 1; status.ok() && number < layer.norms.size(); ++number) {
    v1::ObserveRequest more;
    more.set_sequence_id(sequence.value());
    more.set_layer(index);
    TensorCarrier tensors(session);
    const std::vector<std::byte> norms = FillNorms(index, layer, number, to_another, more);
    if (!norms.empty()) tensors.Add(*more.mutable_norm_queries(), norms);
    status = Send(session, index, more, tensors, response);
  }
  if (!status.ok()) return status;
  return response;
}

// Sends everything except queries that exceed one piece. Releases its place in the staging arena on
// return, because the next piece may need it.
absl::Status Observer::SendFirstPiece(Session& session, SequenceId sequence, std::uint32_t index,
                                      const Layer& layer, bool to_another, std::uint64_t& sent,
                                      v1::ObserveResponse& response) const {
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  v1::ObserveRequest request;
  request.set_sequence_id(sequence.value());
  request.set_layer(index);
  TensorCarrier tensors(session);
  sent = FillLast(geometry, layer, 0, request, tensors);
  const std::vector<std::byte> norms = FillNorms(index, layer, /*number=*/0, to_another, request);
  if (!norms.empty()) tensors.Add(*request.mutable_norm_queries(), norms);
  std::vector<float> sums;
  for (const std::vector<double>& head : layer.sums) {
    sums.insert(sums.end(), head.begin(), head.end());
  }
  if (!sums.empty()) {
    SetShape(v1::DTYPE_FP32, {layer.sums.size(), layer.sums.front().size()},
             *request.mutable_attention_sums());
    tensors.Add(*request.mutable_attention_sums(), std::as_bytes(std::span(sums)));
    request.set_first_sum_position(layer.sums_first);
  }
  if (sent == 0 && sums.empty() && !request.has_first_norm_token()) return absl::OkStatus();
  return Send(session, index, request, tensors, response);
}

std::uint64_t Observer::FillLast(const kernels::LayerGeometry& geometry, const Layer& layer,
                                 std::uint64_t first_row, v1::ObserveRequest& request,
                                 TensorCarrier& tensors) const {
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  const std::uint64_t rows = layer.last.size() / token_bytes - first_row;
  if (rows == 0) return 0;
  // The window that the policy needs always travels in one piece, regardless of its size.
  const std::uint64_t piece =
      std::max({std::uint64_t{1}, kPieceBytes / token_bytes, std::uint64_t{needs_.last_queries()}});
  const std::uint64_t count = layer.wants_all ? std::min(rows, piece) : rows;
  SetShape(ToDType(geometry.type), {count, geometry.query_heads, geometry.head_dim},
           *request.mutable_last_queries());
  tensors.Add(*request.mutable_last_queries(),
              std::span(layer.last).subspan(first_row * token_bytes, count * token_bytes));
  request.set_first_query_position(layer.last_first + first_row);
  return count;
}

}  // namespace tessera::client
