// How many calls of workers run at a time. Each uses a thread (call_threads.h).
//
// Admission (admission.h) additionally limits long calls. These numbers cover all calls, including
// those that wait for memory or for a sequence that is being moved. Shares (shares.h) divides the
// places between the tenants.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::serving {

// Places for all tenants. 240 is far more than Admission admits; each tenant adds two for running
// and two for waiting long calls.
constexpr std::uint64_t MaxCallsFor(std::size_t tenants) { return 240 + 4 * tenants; }

// One tenant may have half of the places while the others reach their shares.
constexpr std::size_t CallThreadsFor(std::size_t tenants) {
  return MaxCallsFor(tenants) + MaxCallsFor(tenants) / 2;
}

}  // namespace tessera::serving
