// The pages of the daemon's HTTP address: metrics, health, readiness, version and an index.
#pragma once

#include <vector>

#include "daemon/http/server.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

// `services` outlives the pages. None of them but /metrics takes a lock that work holds, so they
// answer while the cache is stuck.
std::vector<http::Page> StatusPages(const Services& services);

}  // namespace tessera::serving
