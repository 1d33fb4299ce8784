// Bulk append: cutting a run of tokens into requests, through the staging arena or inline.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/sequence/sequence_state.h"
#include "client/session/session.h"
#include "tessera/sequence.h"

namespace tessera::client {

// The tokens that every layer holds then. See Sequence::Append.
absl::StatusOr<std::uint64_t> BulkAppend(Session& session, SequenceState& sequence,
                                         const AppendTensors& tensors);

// Asks the daemon what the sequence holds, after a call whose outcome is unknown.
absl::Status RefreshTokens(Session& session, SequenceState& sequence);

// Of an append that was refused: where another one has moved the sequence's tokens, says so and
// learns by how much.
absl::Status LearnPositionShift(Session& session, SequenceState& sequence,
                                const absl::Status& refused);

// Has the daemon keep the first `tokens` tokens of it.
absl::Status CutTo(Session& session, SequenceId sequence, std::uint64_t tokens);
// Takes back what is left of a step that was abandoned, where that did not work at once.
absl::Status CutAbandonedRows(Session& session, SequenceState& sequence);
// The same for calls that only read, and may do so beside others: mostly there is nothing to do.
absl::Status CutBeforeReading(Session& session, const std::shared_ptr<SequenceState>& sequence);

// How a run of layers x tokens is cut so that no piece has more than `most` bytes: whole tokens of
// all layers where one fits, else layer by layer.
struct PieceShape {
  std::uint32_t layers = 0;
  std::uint64_t tokens = 0;
};
// 0 tokens where not even one token of one layer fits.
PieceShape ShapePieces(std::uint32_t layers, std::uint64_t tokens, std::uint64_t token_bytes,
                       std::uint64_t most);

}  // namespace tessera::client
