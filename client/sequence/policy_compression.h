// Compression by a sequence's policy: observations travel to the daemon, which then decides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/sequence/sequence_state.h"
#include "client/session/session.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

enum class CompressMode {
  kWait,       // until the daemon has finished
  kToAnother,  // likewise; the result is for workers that have none of this one's observations
  kMarkEnd,    // ends the prompt: the daemon compresses in the background
};

// Compresses the layers [first_layer, first_layer + layers); 0 layers: all from first_layer on.
// Sets a warning in `sequence` if the policy had no effect on a prompt.
absl::StatusOr<v1::CompressResponse> CompressByPolicy(Session& session, SequenceState& sequence,
                                                      std::uint32_t first_layer,
                                                      std::uint32_t layers,
                                                      CompressMode mode = CompressMode::kWait);

// Sends everything that was observed, for a worker that takes the sequence over.
absl::Status SendObservations(Session& session, SequenceState& sequence);

// Before a step: whether the policy acts while decoding, and a prompt or a tile of tokens has been
// appended since it last acted.
bool DueForCompression(const SequenceState& sequence);

// Before a step: warnings for the worker. From time to time it asks the daemon for the outcome of a
// prompt that is compressed in the background.
std::vector<std::string> WarningsBeforeStep(Session& session, SequenceState& sequence);

}  // namespace tessera::client
