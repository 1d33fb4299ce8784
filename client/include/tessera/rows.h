// Rows of a sequence, read back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/model.h"

namespace tessera::client {

// Which rows of a layer Sequence::Read returns.
struct RowRange {
  std::uint32_t layer = 0;
  std::uint32_t first_kv_head = 0;
  std::uint32_t kv_heads = 0;  // 0: all from first_kv_head on
  std::uint64_t first_entry = 0;
  std::uint64_t entries = 0;        // of each lane; 0: all from first_entry on
  std::optional<ElementType> type;  // the model's or kFp32; unset: the model's
};

// Entries of one lane, in lane order, decoded as attention sees them: rotated back, and 0 where
// packing dropped a channel. Policies may keep different entries of each kv head.
struct LaneRows {
  std::uint32_t kv_head = 0;
  std::uint64_t lane_entries = 0;        // that the lane holds, those of the tail included
  std::vector<std::byte> key;            // [entries][head_dim]
  std::vector<std::byte> value;          // likewise
  std::vector<std::uint64_t> positions;  // the number of each entry's token
  std::vector<float> weights;            // tokens that each entry stands for; empty: 1 each
};

struct SequenceRows {
  ElementType type = ElementType::kFp32;  // of keys and values
  std::uint64_t tokens = 0;               // that the layer held
  std::vector<LaneRows> lanes;
};

}  // namespace tessera::client
