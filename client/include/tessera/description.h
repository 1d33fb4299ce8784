// What the daemon says about a sequence and about itself.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/compression.h"
#include "tessera/ids.h"

namespace tessera::client {

// What a policy must observe of a prompt before it compresses it. All zero: nothing.
struct PolicyNeeds {
  std::uint32_t last_queries = 0;  // the newest queries, of every query head: at least so many,
  double last_share = 0;           // and at least this share of the tokens
  double norm_share = 0;           // this share of the tokens: the queries of the largest norm
  bool attention_sums = false;     // the attention that each key receives: Observe takes keys, too
  bool token_ids = false;          // ObserveTokens
  bool decode_queries = false;     // the queries of decoded tokens; steps observe them
  bool acts_while_decoding = false;  // BeginStep compresses from time to time
  std::uint32_t layers_alike = 0;    // above 1: only the first layer of every so many is observed

  // Whether Observe takes anything at all.
  bool queries() const {
    return attention_sums || last_queries > 0 || last_share > 0 || norm_share > 0;
  }
  friend bool operator==(const PolicyNeeds&, const PolicyNeeds&) = default;
};

enum class SequenceStatus : std::uint8_t { kUnknown, kLive, kFailed, kOffloaded };

// Consecutive segments of a lane with the same strategy.
struct SegmentRun {
  std::uint32_t segments = 0;
  std::uint64_t entries = 0;
  std::uint64_t first_position = 0;
  std::string format;  // "dense bf16", "packed int8"
  // Packed rows: the channels of keys in use, and how many of them each row keeps.
  std::uint32_t channels = 0;
  std::uint32_t kept_channels = 0;
  std::uint32_t value_channels = 0;
  std::uint32_t value_kept_channels = 0;
  std::uint32_t group = 0;
  Summary summary = Summary::kNone;
  std::uint32_t block = 0;
  std::uint64_t tile_bytes = 0;
  std::uint64_t rotation_bytes = 0;  // 0: not rotated
  std::uint64_t table_bytes = 0;
  std::uint64_t summary_bytes = 0;  // of block summaries; part of tile_bytes
  bool provisional = false;         // encoded with the previous strategy until they get their own
  double key_loss = 0;              // 1 - |kept|^2 / |row|^2 in the mean; 0 if unknown
  double value_loss = 0;
};

struct LaneDescription {
  std::uint32_t layer = 0;
  std::uint32_t kv_head = 0;
  std::uint64_t tokens = 0;        // that the entries stand for, dropped ones included
  std::uint64_t entries = 0;       // in segments
  std::uint64_t tail_entries = 0;  // committed, in the tail ring
  std::uint32_t segments = 0;
  std::uint64_t tile_bytes = 0;
  double tokens_kept = 1;  // shares of what was appended; see SequenceDescription
  double elements_kept = 1;
  double bytes_kept = 1;
  std::vector<SegmentRun> runs;
  std::vector<std::uint64_t> positions;  // of each entry; only from DescribeEntries
  std::vector<float> weights;            // tokens that each entry stands for; empty: 1 each
  LaneOutcome outcome;                   // what compression did with the lane
};

struct SequenceDescription {
  SequenceId id;
  std::string policy;
  SequenceStatus status = SequenceStatus::kUnknown;
  std::string failure;       // why, if kFailed
  std::uint64_t tokens = 0;  // committed tokens, tail included
  bool decoding = false;     // has tail rings
  std::uint64_t tile_bytes = 0;
  std::uint64_t shared_tile_bytes = 0;  // of those, in segments that other sequences hold, too
  std::uint64_t rotation_bytes = 0;
  std::uint64_t table_bytes = 0;
  std::uint64_t raw_copy_bytes = 0;   // in host memory, of entries that wait for a strategy
  std::uint64_t offloaded_bytes = 0;  // in the host tier, instead of in the pool
  std::uint64_t position_shift = 0;   // token t has the rotary position t - position_shift
  // Shares of what was appended, tails excluded: tokens that have entries, channels that entries
  // keep, and bytes including rotations and tables.
  double tokens_kept = 1;
  double elements_kept = 1;
  double bytes_kept = 1;
  std::vector<OutcomeGroup> outcomes;  // what compression did with the lanes
  std::vector<LaneDescription> lanes;
};

struct TenantStats {
  std::string name;
  std::uint64_t used_bytes = 0;
  std::uint64_t hard_limit_bytes = 0;  // 0: none but the pool's
  std::uint64_t soft_limit_bytes = 0;  // 0: none
  std::uint32_t sequences = 0;
  std::uint32_t decoding_sequences = 0;
  std::uint64_t prefixes = 0;
  std::uint64_t prefix_bytes = 0;
  std::uint64_t tokens_appended = 0;  // since the daemon started
  std::uint64_t offloaded_bytes = 0;
  std::uint32_t offloaded_sequences = 0;
};

struct DaemonStats {
  std::string version;
  std::string device;          // "cpu" or "cuda:N", as the daemon numbers devices
  std::string device_uuid;     // "GPU-...", "MIG-..." or "CPU-..."; empty: none
  std::string implementation;  // of the attention kernels
  std::chrono::duration<double> uptime{0};
  bool draining = false;
  std::uint32_t sessions = 0;
  std::uint64_t pool_limit_bytes = 0;  // of all tenants
  std::uint64_t pool_reserved_bytes = 0;
  std::uint64_t host_tier_bytes = 0;
  std::uint64_t host_tier_limit_bytes = 0;  // 0: turned off
  TenantStats tenant;                       // the worker's own
};

// The daemon of an attachment, as it introduced itself.
struct DaemonInfo {
  std::string tenant;
  std::string device;                 // "cpu" or "cuda:N", as the daemon numbers devices
  std::string device_uuid;            // "GPU-...", "MIG-..." or "CPU-..."; empty: none
  std::uint32_t tail_ring_tiles = 0;  // capacity of a lane's tail ring, in tiles of 32 tokens
  std::uint64_t max_message_bytes = 0;
  std::uint64_t staging_bytes = 0;
  std::string prefix_hash;  // "xxh3-128/32"
  std::uint64_t prefix_hash_seed = 0;
  std::chrono::milliseconds pin_limit{0};  // a step that takes longer may fail with ABORTED
};

}  // namespace tessera::client
