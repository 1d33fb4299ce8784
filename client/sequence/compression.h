// Compress and Select as RPCs.
#pragma once

#include "absl/status/statusor.h"
#include "client/session/bound_model.h"
#include "client/session/session.h"
#include "kernels/dispatch/attend.h"
#include "tessera/compression.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

absl::StatusOr<v1::CompressResponse> CompressByRpc(Session& session, const BoundModel& model,
                                                   SequenceId sequence, const Packing& packing,
                                                   const RotationTensors& rotations);

// INVALID_ARGUMENT if the rule has neither a rate above 0 and at most 1, nor entries.
absl::Status CheckRule(const SelectionRule& rule);
void ToProto(const kernels::SelectionRule& rule, v1::Selection& selection);

}  // namespace tessera::client
