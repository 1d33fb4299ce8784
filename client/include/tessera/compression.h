// Compress and Select: what the daemon does with the form of a sequence's KV, on a worker's word.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "client/sequence/sequence_state.h"
#include "client/session/session.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/tile_shape.h"
#include "tessera/model.h"

namespace tessera::client {

// The form of rows: of the first `channels` channels of each rotated key or value the largest
// `kept_channels` are kept, whole groups of `group` at a time.
struct Packing {
  std::uint32_t kept_channels = 0;
  std::uint32_t group = 1;  // 1, 2 or 4
  kernels::ValueType values = kernels::ValueType::kBf16;
  std::uint32_t channels = 0;  // 0: all
  kernels::Summary summary = kernels::Summary::kNone;
  std::uint32_t block = 0;  // 4, 8 or 16; 0: 8 where there is a summary
  bool dense = false;  // rows stay as they are, and get summaries; fields above `summary` unset
  std::uint32_t first_layer = 0;
  std::uint32_t layers = 0;  // 0: all from first_layer on
};

// One R_k and R_v per lane, rows orthonormal: [layers][kv_heads][channels][head_dim]. Host memory.
struct RotationTensors {
  std::span<const std::byte> key;  // empty: no rotations
  std::span<const std::byte> value;
  kernels::ElementType type = kernels::ElementType::kBf16;  // or fp32
};

absl::StatusOr<v1::CompressResponse> CompressByRpc(Session& session, const BoundModel& model,
                                                   SequenceId sequence, const Packing& packing,
                                                   const RotationTensors& rotations);

// INVALID_ARGUMENT unless the rule has either entries or a rate above 0 and at most 1; a floor goes
// with a rate only.
absl::Status CheckRule(const kernels::SelectionRule& rule);
void ToProto(const kernels::SelectionRule& rule, v1::Selection& selection);

}  // namespace tessera::client
