// The limits of the configuration. Validation enforces them, and the comments of config.proto state
// them (a test compares both).
#pragma once

#include <cstddef>
#include <cstdint>

#include "daemon/base/bytes.h"

namespace tessera::config {

// Size of a huge page, and the unit in which a CUDA device exports memory.
inline constexpr std::uint64_t kExtentUnit = 2 * kMiB;

struct Range {
  std::uint64_t min;
  std::uint64_t max;
};

inline constexpr Range kPoolExtentBytes = {kExtentUnit, 16 * kGiB};
inline constexpr Range kStagingBytes = {kExtentUnit, 64 * kGiB};
inline constexpr Range kTailRingTiles = {2, 64};
inline constexpr Range kTailExtentBytes = {kExtentUnit, 16 * kGiB};
inline constexpr Range kDirectoryExtentBytes = {kExtentUnit, kGiB};
inline constexpr Range kMaxSessions = {1, 4096};
inline constexpr Range kMaxSequencesPerTenant = {1, 1048576};
inline constexpr Range kMaxModelsPerTenant = {1, 4096};
inline constexpr Range kMaxPrefixesPerTenant = {1, 1048576};
inline constexpr Range kMaxMessageBytes = {64 * kKiB, 2147483647};  // gRPC uses int
inline constexpr Range kCompactorThreads = {1, 256};
inline constexpr Range kCompactorCpus = {0, 4095};  // CPU numbers
inline constexpr Range kCompactorLingerMs = {0, 60'000};
inline constexpr Range kRawCopyBytes = {kMiB, 1024 * kGiB};
inline constexpr Range kHostTierBytes = {0, 1024 * kGiB};
inline constexpr Range kOffloadIdleMs = {0, 3'600'000};
inline constexpr Range kPressurePercent = {1, 100};
inline constexpr Range kPinLimitMs = {10, 600'000};
inline constexpr Range kDrainLimitMs = {0, 3'600'000};
inline constexpr Range kTcpPeerLimitMs = {5000, 3'600'000};
inline constexpr Range kSlowCallMs = {0, 3'600'000};
inline constexpr Range kTenants = {1, 256};
inline constexpr Range kBooks = {0, 64};

// Host memory that the budget keeps for messages: 1/32 of it within these limits, and at most an
// eighth.
inline constexpr Range kTransportBytes = {256 * kMiB, 2 * kGiB};
// Host memory that the budget keeps for the heap; a tenth where that is less.
inline constexpr std::uint64_t kHeapBytes = 256 * kMiB;
// With less memory, the daemon returns freed memory to the kernel at once.
inline constexpr std::uint64_t kLittleMemory = 4 * kGiB;

inline constexpr std::size_t kMaxTenantName = 63;  // characters
inline constexpr std::size_t kMaxToken = 256;      // characters
inline constexpr std::size_t kMaxConfigFile = kMiB;

}  // namespace tessera::config
