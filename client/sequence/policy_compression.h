// Compression by a sequence's policy: observations travel to the daemon, which then decides.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/sequence/sequence_state.h"
#include "client/session/session.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

// Of the layers [first_layer, first_layer + layers); 0 layers: all from first_layer on.
// `to_another`: the result is for workers that have none of this one's observations.
absl::StatusOr<v1::CompressResponse> CompressByPolicy(Session& session, SequenceState& sequence,
                                                      std::uint32_t first_layer,
                                                      std::uint32_t layers,
                                                      bool to_another = false);

// Sends everything that was observed, for a worker that takes the sequence over.
absl::Status SendObservations(Session& session, SequenceState& sequence);

// Before a step: whether the policy acts while decoding, and a prompt or a tile of tokens has come
// since it acted last.
bool DueForCompression(const SequenceState& sequence);

}  // namespace tessera::client
