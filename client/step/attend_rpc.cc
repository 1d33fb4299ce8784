#include "client/step/attend_rpc.h"

#include <algorithm>
#include <cstring>

#include "client/sequence/compression.h"
#include "client/session/tensor_carrier.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

constexpr std::uint64_t kItemOverhead = 128;

// Bytes of one row in the request or the response, whichever is larger.
std::uint64_t BytesOf(const AttendRow& row, std::size_t query_heads) {
  const std::uint64_t lse = std::uint64_t{row.queries} * query_heads * sizeof(float);
  return std::max<std::uint64_t>(row.query.size(), row.output.size() + lse) + kItemOverhead;
}

absl::Status TakeOutput(const v1::AttendOutput& answer, const AttendRow& row,
                        std::size_t query_heads) {
  const std::string& bytes = answer.output().inline_();
  const std::size_t lse = std::size_t{row.queries} * query_heads;
  if (bytes.size() != row.output.size() || static_cast<std::size_t>(answer.lse_size()) != lse) {
    return absl::InternalError(Concat(
        "the daemon answered ", bytes.size(), " bytes and ", answer.lse_size(), " lse values for ",
        row.sequence.ToString(), "; expected are ", row.output.size(), " and ", lse));
  }
  std::memcpy(row.output.data(), bytes.data(), bytes.size());
  if (!row.lse.empty()) std::copy(answer.lse().begin(), answer.lse().end(), row.lse.begin());
  return absl::OkStatus();
}

absl::Status AttendSome(Session& session, const AttendCall& call, std::span<const AttendRow> rows) {
  const kernels::LayerGeometry& geometry = call.model->geometry(call.layer);
  v1::AttendRequest request;
  request.set_layer(call.layer);
  request.set_output_dtype(ToDType(call.output_type));
  request.set_non_causal(!call.causal);
  for (const AttendRow& row : rows) {
    v1::AttendItem& item = *request.add_items();
    item.set_sequence_id(row.sequence.value());
    if (row.first_query_position.has_value()) {
      item.set_first_query_position(*row.first_query_position);
    }
    if (call.selection.has_value()) ToProto(*call.selection, *item.mutable_selection());
    v1::Tensor& query = *item.mutable_query();
    query.set_dtype(ToDType(call.model->type()));
    query.add_shape(row.queries);
    query.add_shape(geometry.query_heads);
    query.add_shape(geometry.head_dim);
    query.set_inline_(row.query.data(), row.query.size());
  }
  v1::AttendResponse response;
  if (absl::Status status = session.Call(request, response); !status.ok()) return status;
  if (response.outputs_size() != static_cast<int>(rows.size())) {
    return absl::InternalError(
        Concat(response.outputs_size(), " outputs received for ", rows.size(), " items"));
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    absl::Status status =
        TakeOutput(response.outputs(static_cast<int>(i)), rows[i], geometry.query_heads);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AttendByRpc(Session& session, const AttendCall& call) {
  const std::uint64_t limit = session.welcome().max_message_bytes() -
                              std::min(kMessageOverhead, session.welcome().max_message_bytes());
  const std::size_t query_heads = call.model->geometry(call.layer).query_heads;
  std::span<const AttendRow> left = call.rows;
  while (!left.empty()) {
    std::uint64_t bytes = BytesOf(left[0], query_heads);
    std::size_t count = 1;
    // A single row that is too large is sent anyway: the daemon's error names its limit.
    while (count < left.size() && bytes + BytesOf(left[count], query_heads) <= limit) {
      bytes += BytesOf(left[count++], query_heads);
    }
    absl::Status status = AttendSome(session, call, left.first(count));
    if (!status.ok()) return status;
    left = left.subspan(count);
  }
  return absl::OkStatus();
}

}  // namespace tessera::client
