// What every sequence of a tenant works with. The tenant owns all of it and outlives its sequences.
#pragma once

#include <atomic>
#include <cstdint>

#include "daemon/base/clock.h"
#include "daemon/cache/memory/directory.h"
#include "daemon/device/device.h"
#include "daemon/pool/epochs.h"
#include "daemon/pool/pool.h"
#include "daemon/tiers/host/host_tier.h"

namespace tessera::cache {

// Counts since start; each is a metric of its own.
struct TenantCounters {
  std::atomic<std::uint64_t> tokens_appended{0};       // by Append, over all layers once
  std::atomic<std::uint64_t> tail_tokens_absorbed{0};  // from tails into segments
  std::atomic<std::uint64_t> tiles_written{0};
  std::atomic<std::uint64_t> entries_packed{0};  // as PackOutcome counts them
  // By token policies, lane by lane: as many as a lane holds less than before.
  std::atomic<std::uint64_t> entries_dropped{0};
  std::atomic<std::uint64_t> pack_bytes_before{0};
  std::atomic<std::uint64_t> pack_bytes_after{0};
  std::atomic<std::uint64_t> snapshots_published{0};
  std::atomic<std::uint64_t> sequences_failed{0};
  std::atomic<std::uint64_t> attend_requests{0};
  std::atomic<std::uint64_t> select_requests{0};
  std::atomic<std::uint64_t> tail_full_waits{0};
  std::atomic<std::uint64_t> offloads{0};
  std::atomic<std::uint64_t> restores{0};
  std::atomic<std::uint64_t> offloaded_bytes{0};  // that left the pool
  std::atomic<std::uint64_t> restored_bytes{0};   // that came back
};

struct TenantMemory {
  Directory* directory;
  pool::Pool* pool;
  pool::Epochs* epochs;
  device::Device* device;
  TenantCounters* counters;
  pool::Account* raw_copies;    // of the tenant, as the next two
  pool::Account* observations;  // what workers show for token policies
  pool::Account* offloaded;     // what it has in the host tier
  tiers::HostTier* host_tier;   // of the node
  const Clock* clock;
};

}  // namespace tessera::cache
