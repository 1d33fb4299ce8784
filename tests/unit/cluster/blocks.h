// Blocks and readers for tests.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "daemon/cache/prefix/block_events.h"

namespace tessera::cluster {

inline cache::BlockEvent Stored(std::uint64_t hash, std::optional<std::uint64_t> parent = {}) {
  cache::BlockEvent event = {.stored = true, .hash = hash, .parent = parent, .ids = {}};
  for (std::size_t i = 0; i < event.ids.size(); ++i) {
    event.ids[i] = static_cast<std::uint32_t>(1000 * hash + i);
  }
  return event;
}

inline cache::BlockEvent Removed(std::uint64_t hash) {
  return {.stored = false, .hash = hash, .parent = {}, .ids = {}};
}

}  // namespace tessera::cluster
