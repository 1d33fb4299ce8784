// Attention through RPC: for the RPC transport, and for Worker::AttendRpc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "client/session/bound_model.h"
#include "client/session/session.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/element.h"

namespace tessera::client {

// One sequence of a batch. The spans have exactly the sizes of the shapes.
struct AttendRow {
  SequenceId sequence;
  std::uint32_t queries = 1;
  std::span<const std::byte> query;  // [queries][query_heads][head_dim], the model's type
  std::span<std::byte> output;       // the same shape, in the output type
  std::span<float> lse;              // [queries][query_heads]; empty: not wanted
  std::optional<std::uint64_t> first_query_position;  // unset: the last query has the last token's
};

struct AttendCall {
  const BoundModel* model = nullptr;
  std::uint32_t layer = 0;
  kernels::ElementType output_type = kernels::ElementType::kFp32;
  bool causal = true;
  std::optional<kernels::SelectionRule> selection;  // for every row; unset: each policy decides
  std::span<const AttendRow> rows;
};

// Splits the rows into requests that fit into the daemon's largest message.
absl::Status AttendByRpc(Session& session, const AttendCall& call);

}  // namespace tessera::client
