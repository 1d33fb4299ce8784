// Compression and block selection, as a worker asks for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/model.h"

namespace tessera::client {

// The type of the values in a packed row.
enum class ValueType : std::uint8_t { kBf16 = 1, kFp16 = 2, kInt8 = 3, kFp8 = 4 };

// The summary by which a selection scores a block of entries.
enum class Summary : std::uint8_t {
  kNone = 0,
  kMean = 1,    // the mean key
  kMinMax = 2,  // the least and the greatest key, per channel
  kSigns = 3,   // by key: signs of half of its rotated channels, and a norm; made by policies only
};

// How rows are packed: of the first `channels` channels of each rotated key or value the largest
// `kept_channels` are kept, in whole groups of `group`.
struct Packing {
  std::uint32_t kept_channels = 0;
  std::uint32_t group = 1;  // 1, 2 or 4
  ValueType values = ValueType::kBf16;
  std::uint32_t channels = 0;  // 0: all
  Summary summary = Summary::kNone;
  std::uint32_t block = 0;  // 4, 8 or 16; 0: 8 if there is a summary
  bool dense = false;       // keep dense rows and add summaries; fields above `summary` unset
  std::uint32_t first_layer = 0;
  std::uint32_t layers = 0;  // 0: all from first_layer on
};

// One R_k and R_v per lane, rows orthonormal: [layers][kv_heads][channels][head_dim]. Host memory.
struct RotationTensors {
  std::span<const std::byte> key;  // empty: no rotations
  std::span<const std::byte> value;
  ElementType type = ElementType::kBf16;  // or fp32
};

enum class LaneState : std::uint8_t { kUnknown, kCompressed, kPartly, kDense };

// Why entries of a lane are dense, or why a call did nothing.
enum class CompressionReason : std::uint8_t {
  kNone,             // nothing is left dense
  kLossAboveLimit,   // the best strategy loses more than the policy allows
  kTooShort,         // the policy does nothing with so few tokens
  kWaiting,          // not the end of a prompt, and too few tokens for a segment
  kNotObserved,      // observations that the policy decides by are missing
  kNoMemory,         // old and new form did not fit; the daemon tries again
  kNothingNew,       // everything was compressed before
  kPolicyDense,      // the policy keeps rows dense
  kSegmentOverhead,  // with its rotations a segment of so few tokens would be larger
  kValueOutOfRange,  // a value is too large for the type of packed values
  kNewest,           // the first and newest tokens, which the policy keeps dense
  kNothingToDrop,    // the policy found no entries to drop or merge
  kOther,            // see the text
};

struct LaneOutcome {
  LaneState state = LaneState::kUnknown;
  CompressionReason reason = CompressionReason::kNone;
  std::uint64_t compressed_entries = 0;
  std::uint64_t dense_entries = 0;
  double loss = 0;  // measured, with kLossAboveLimit
  double loss_limit = 0;
  bool of_values = false;         // the loss is that of values, not of keys
  std::uint64_t more_tokens = 0;  // that would change it; 0: unknown, or none would
  std::string text;               // the outcome in one sentence
};

// Lanes with the same state and reason.
struct OutcomeGroup {
  std::uint32_t lanes = 0;
  // Of the worst lane among them.
  std::uint32_t layer = 0;
  std::uint32_t kv_head = 0;
  LaneOutcome worst;
};

// What a Compress call did.
struct CompressResult {
  std::uint64_t entries_packed = 0;     // by this call
  std::uint64_t entries_left = 0;       // already compressed before, and left unchanged
  std::uint64_t entries_dropped = 0;    // by a token policy
  std::uint64_t tile_bytes_before = 0;  // of all segments of these layers
  std::uint64_t tile_bytes_after = 0;
  std::uint64_t rotation_bytes = 0;  // of the rotations that these layers hold now
  // Token t now has the rotary position t - position_shift.
  std::uint64_t position_shift = 0;
  // Policies that choose tokens, per layer of the call: the tokens before this one are decided.
  std::vector<std::uint64_t> decided_tokens;
  std::vector<OutcomeGroup> outcomes;  // what was done with the lanes, what was not, and why
};

// What attention reads of a lane: of segments with block summaries the best blocks, until they hold
// a budget of entries; everything else, and the tail, in full. The choice is made once per kv head,
// or once per query head (`each_head`), for all queries together or for each (`each_query`).
struct SelectionRule {
  // How a query row scores a block: relative to the row's log-sum-exp over all blocks, so that
  // every row has the same weight, or by the logit itself. The largest score over the rows counts.
  enum class Judge : std::uint8_t { kShare, kLogit };

  double rate = 1;            // of the entries that the queries may see in such segments
  std::uint64_t entries = 0;  // if not 0: the budget itself, instead of `rate`
  std::uint64_t floor = 0;    // least budget by `rate`, in entries
  Judge judge = Judge::kShare;
  bool first_block = false;  // always read the first block
  bool counts_tail = false;  // the newest rows, in no block yet, count against the budget
  bool each_head = false;
  bool each_query = false;

  friend bool operator==(const SelectionRule&, const SelectionRule&) = default;
};

// Entries at consecutive positions.
struct PositionRun {
  std::uint64_t first_position = 0;
  std::uint64_t entries = 0;
};

// What a rule selects for one kv head, or for one query head if each has its own choice.
struct HeadSelection {
  std::uint32_t kv_head = 0;
  std::uint32_t query_head = 0;  // with each_head; else 0
  std::uint32_t query = 0;       // with each_query; else 0
  std::vector<PositionRun> runs;
  std::uint64_t selected_entries = 0;         // in these runs
  std::uint64_t entries_without_summary = 0;  // read in full
  std::uint64_t tail_entries = 0;             // read in full
  std::uint64_t visible_entries = 0;          // all that the queries see
};

struct SelectResult {
  std::vector<HeadSelection> heads;
  std::uint64_t tokens = 0;  // that the sequence held when it was read
};

}  // namespace tessera::client
