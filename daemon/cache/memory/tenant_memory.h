// The shared services that every sequence of a tenant uses. The tenant owns them, and they outlive
// its sequences.
#pragma once

#include <atomic>
#include <cstdint>

#include "daemon/base/clock.h"
#include "daemon/cache/memory/directory.h"
#include "daemon/device/device.h"
#include "daemon/metrics/instruments.h"
#include "daemon/pool/epochs.h"
#include "daemon/pool/pool.h"
#include "daemon/tiers/host/host_tier.h"
#include "proto/shm/layout.h"

namespace tessera::cache {

// Counters since start. Each one is exported as a metric.
struct TenantCounters {
  std::atomic<std::uint64_t> tokens_appended{0};       // by Append, once all layers have them
  std::atomic<std::uint64_t> tokens_committed{0};      // by workers, in tail rings
  std::atomic<std::uint64_t> tail_tokens_absorbed{0};  // moved from tails into segments
  std::atomic<std::uint64_t> tiles_written{0};
  std::atomic<std::uint64_t> entries_packed{0};  // counted as in PackOutcome
  // Entries that token policies removed, summed over lanes.
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
  std::atomic<std::uint64_t> offloaded_bytes{0};                // bytes that left the pool
  std::atomic<std::uint64_t> restored_bytes{0};                 // bytes restored into the pool
  metrics::DurationHistogram step_waits{shm::kStepWaitBounds};  // as workers count them
  metrics::DurationHistogram restore_times{metrics::kMoveBounds};
  metrics::DurationHistogram match_waits{metrics::kMoveBounds};
};

class BookLibrary;
class BookShelf;

struct TenantMemory {
  Directory* directory;
  pool::Pool* pool;
  pool::Epochs* epochs;
  device::Device* device;
  TenantCounters* counters;
  pool::Account* raw_copies;    // tenant account, like the next two
  pool::Account* observations;  // what workers observed for token policies
  pool::Account* offloaded;     // this tenant's share of the host tier
  tiers::HostTier* host_tier;   // shared by the node
  const Clock* clock;
  // For heap memory that the tenant causes: it counts against the tenant's limit and against the
  // node's memory, like bytes of the pool. Otherwise objects without rows would be unlimited.
  pool::Account* heap;
  BookShelf* books;
  const BookLibrary* loaded_books;  // of the node; null: none
};

}  // namespace tessera::cache
