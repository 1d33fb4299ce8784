// Checks of the first message of a worker.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// Versions, and limits of every field that the daemon keeps.
absl::Status CheckHello(const v1::Hello& hello);

// FAILED_PRECONDITION if the worker relies on another prefix hash or seed: it would silently find
// no prefix.
absl::Status CheckPrefixHash(const v1::Hello& hello, std::uint64_t seed);

}  // namespace tessera::serving
