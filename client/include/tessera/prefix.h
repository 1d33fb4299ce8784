// Published prefixes, as a worker asks for them and makes them.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "daemon/base/clock.h"
#include "daemon/base/ids.h"
#include "tessera/model.h"

namespace tessera::client {

struct PublishOptions {
  // Since it was last published, matched or forked, while nothing forked from it lives. Zero: no
  // limit.
  std::chrono::milliseconds ttl{0};
  bool pinned = false;  // stays until it is freed by name
};

struct PublishedPrefix {
  PrefixId prefix;
  std::uint64_t tokens = 0;
  bool deduplicated = false;  // somebody had published these tokens before
  bool rebased = false;       // the sequence reads that copy now, and its own is gone
};

struct MatchOptions {
  std::string policy;  // as CreateSequence takes it
  std::span<const std::uint32_t> tokens;
  // How long to wait where another worker computes more of them than is published.
  std::chrono::milliseconds wait{0};
  // This worker computes, and publishes, what it does not find: others may wait for that.
  bool will_compute = false;
};

struct PrefixMatch {
  Model model;
  PrefixId prefix;              // invalid: nothing is published
  std::uint64_t tokens = 0;     // that match; Fork takes as many
  std::uint64_t computing = 0;  // more than `tokens`: as many as another worker computes now
  // Where this worker computes the rest. Over when it has published the list; to be withdrawn
  // where it will not.
  ComputationId computation;

  bool found() const { return prefix.valid(); }
};

}  // namespace tessera::client
