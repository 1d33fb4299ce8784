// The RPC methods as the metrics count them: every method of both services, from the start.
#pragma once

#include <string_view>

#include "daemon/metrics/metrics.h"

namespace tessera::serving {

// Values of the label "service", which are the names of the services.
inline constexpr std::string_view kWorkerServiceName = "Tessera";
inline constexpr std::string_view kAdminServiceName = "TesseraAdmin";

// Adds the methods that the services' descriptors list, so that each has its series before its
// first call.
void AddRpcMethods(metrics::Metrics& metrics);

}  // namespace tessera::serving
