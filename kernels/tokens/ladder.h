// LaCache's ladder: layers keep different tokens of the same run, so that together they cover more
// than one of them could.
//
// A run of `length` entries is a ladder. Each layer keeps `kept` of them, one after another, at an
// offset of its own, and loses `removed`. With 4 layers, length 4, kept 2, removed 2:
//
//   layer 0  # # . .        mod: offset = layer mod (removed + 1): 0 1 2 0
//   layer 1  . # # .        band: the offsets in order, each for equally many layers: 0 0 1 2
//   layer 2  . . # #
//   layer 3  # # . .
//
// Ladders are laid one behind another from a cursor, which walks towards the newest entries and
// begins again behind the sinks: entries that were laddered once are then laddered again.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::kernels {

struct LadderOptions {
  std::uint32_t layers = 0;
  std::uint32_t span = 0;     // layers that keep the same token
  std::uint32_t overlap = 0;  // tokens that neighbouring bands share
  std::uint64_t sink = 0;     // the first entries, which stay
  std::uint64_t entries = 0;  // that fit; half a ladder's loss more from the first overflow on
  bool band = false;          // else mod
  // Where more must go than one pass may remove: as many ladders a pass as fit, else as many as
  // the entries that are to stay would hold.
  bool uniform = false;
};

struct LadderShape {
  std::uint64_t length = 0;
  std::uint64_t kept = 0;
  std::uint64_t removed = 0;
};

enum class LadderFault {
  kNone,
  kSpan,            // not 1 to layers
  kOverlap,         // not below span
  kNothingRemoved,  // a ladder keeps all its tokens in every layer
  kTooFewEntries,   // less than LeastEntries
};
LadderFault FaultOf(const LadderOptions& options);

// Of options without a fault. LeastEntries: of all but too few entries.
LadderShape ShapeOf(const LadderOptions& options);
std::uint64_t LeastEntries(const LadderOptions& options);
std::uint64_t OffsetOf(const LadderOptions& options, std::uint32_t layer);

// The newest entries that no ladder reaches.
std::uint64_t ProtectedEntries(const LadderOptions& options);

struct LadderState {
  std::uint64_t cursor = 0;
  std::uint64_t capacity = 0;  // 0: nothing has overflowed yet
};

// After a forward step has added entries: `held`, oldest first, loses what no longer fits, in whole
// ladders. The options have no fault.
void StepLadder(const LadderOptions& options, std::uint32_t layer, LadderState& state,
                std::vector<std::uint32_t>& held);

}  // namespace tessera::kernels
