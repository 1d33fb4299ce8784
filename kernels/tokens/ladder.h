// LaCache's ladder: each layer keeps different tokens of the same range, so that together the
// layers cover more tokens than one layer could.
//
// A ladder is a range of `length` entries. Each layer keeps `kept` consecutive entries of it,
// starting at the layer's offset, and drops `removed`. With 4 layers, length 4, kept 2, removed 2:
//
//   layer 0  # # . .        mod: offset = layer mod (removed + 1): 0 1 2 0
//   layer 1  . # # .        band: the offsets in order, each for equally many layers: 0 0 1 2
//   layer 2  . . # #
//   layer 3  # # . .
//
// Ladders are placed one after another from a cursor that moves towards the newest entries. At the
// end it restarts after the sinks, so entries that already went through a ladder go through another
// one.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::kernels {

struct LadderOptions {
  std::uint32_t layers = 0;
  std::uint32_t span = 0;     // number of layers that keep the same token
  std::uint32_t overlap = 0;  // tokens that neighbouring bands share
  std::uint64_t sink = 0;     // the first entries, always kept
  std::uint64_t entries = 0;  // capacity; grows by half a ladder's `removed` at the first overflow
  bool band = false;          // otherwise mod
  // What happens if more must be removed than fits before the end. If set, the cursor restarts
  // after the sinks at once, and a pass has as many ladders as the unprotected entries hold. If
  // not, the cursor first runs to the end, and later passes have as many ladders as the capacity
  // holds.
  bool uniform = false;
};

struct LadderShape {
  std::uint64_t length = 0;
  std::uint64_t kept = 0;
  std::uint64_t removed = 0;
};

enum class LadderFault {
  kNone,
  kSpan,            // not in 1..layers
  kOverlap,         // not below span
  kNothingRemoved,  // a ladder keeps all its tokens in every layer
  kTooFewEntries,   // fewer than LeastEntries
};
LadderFault FaultOf(const LadderOptions& options);

// Require options without a fault; LeastEntries tolerates kTooFewEntries.
LadderShape ShapeOf(const LadderOptions& options);
std::uint64_t LeastEntries(const LadderOptions& options);
std::uint64_t OffsetOf(const LadderOptions& options, std::uint32_t layer);

// The number of newest entries that no ladder reaches.
std::uint64_t ProtectedEntries(const LadderOptions& options);

struct LadderState {
  std::uint64_t cursor = 0;
  std::uint64_t capacity = 0;  // 0: nothing has overflowed yet
};

// Call after a forward step has added entries. Removes from `held` (oldest first) what exceeds the
// capacity, in whole ladders. The options must have no fault.
void StepLadder(const LadderOptions& options, std::uint32_t layer, LadderState& state,
                std::vector<std::uint32_t>& held);

}  // namespace tessera::kernels
