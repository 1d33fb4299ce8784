#include "daemon/config/values/unused_calls.h"

#include <cstddef>

#include "daemon/base/strings.h"

namespace tessera::config {
namespace {

constexpr std::string_view kNames[] = {"auto", "allow", "log", "refuse", "kill"};

}  // namespace

std::string_view UnusedCallsName(UnusedCalls unused) {
  return kNames[static_cast<std::size_t>(unused)];
}

absl::StatusOr<UnusedCalls> ParseUnusedCalls(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<UnusedCalls>(i);
  }
  return absl::InvalidArgumentError(
      Concat("\"", name, "\" is not one of auto, allow, log, refuse and kill"));
}

}  // namespace tessera::config
