// Bulk append: splits a range of tokens into requests, through the staging arena or inline.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/sequence/sequence_state.h"
#include "client/session/session.h"
#include "tessera/sequence.h"

namespace tessera::client {

// Returns the tokens that every layer holds afterwards. See Sequence::Append.
absl::StatusOr<std::uint64_t> BulkAppend(Session& session, SequenceState& sequence,
                                         const AppendTensors& tensors);

// Asks the daemon what the sequence holds, after a call whose outcome is unknown.
absl::Status RefreshTokens(Session& session, SequenceState& sequence);

// After a refused append: if another caller has moved the sequence's positions, updates the shift
// and returns an error that says so; else returns `refused`.
absl::Status LearnPositionShift(Session& session, SequenceState& sequence,
                                const absl::Status& refused);

// Truncates the sequence in the daemon to its first `tokens` tokens.
absl::Status TruncateTo(Session& session, SequenceId sequence, std::uint64_t tokens);
// Removes rows of an abandoned step, if removing them failed when it was abandoned.
absl::Status CutAbandonedRows(Session& session, SequenceState& sequence);
// The same for calls that only read, and may run concurrently. Usually there is nothing to do.
absl::Status CutBeforeReading(Session& session, const std::shared_ptr<SequenceState>& sequence);

// How a range of layers x tokens is split so that no piece has more than `most` bytes: whole tokens
// of all layers if at least one fits, else layer by layer.
struct PieceShape {
  std::uint32_t layers = 0;
  std::uint64_t tokens = 0;
};
// Returns 0 tokens if not even one token of one layer fits.
PieceShape ShapePieces(std::uint32_t layers, std::uint64_t tokens, std::uint64_t token_bytes,
                       std::uint64_t most);

}  // namespace tessera::client
