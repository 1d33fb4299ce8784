// Published prefixes, as a worker finds and publishes them.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/ids.h"
#include "tessera/model.h"

namespace tessera::client {

struct PublishOptions {
  // How long it may be idle: since it was last published, matched or forked, while no fork of it
  // lives. Zero: no limit.
  std::chrono::milliseconds ttl{0};
  bool pinned = false;  // kept until it is freed by id
};

struct PublishedPrefix {
  PrefixId prefix;
  std::uint64_t tokens = 0;
  bool deduplicated = false;  // another worker had published these tokens before
  bool rebased = false;       // the sequence reads that copy now, and its own is freed
};

struct MatchOptions {
  std::string policy;  // as CreateSequence takes it
  std::span<const std::uint32_t> tokens;
  // How long to wait if another worker is computing more of them than is published.
  std::chrono::milliseconds wait{0};
  // This worker will compute and publish what is missing: others may wait for it.
  bool will_compute = false;
};

struct PrefixMatch {
  Model model;
  PrefixId prefix;              // invalid: nothing is published
  std::uint64_t tokens = 0;     // that match; Fork takes as many
  std::uint64_t computing = 0;  // if more than `tokens`: as many are being computed elsewhere
  // Set if this worker computes the rest. It ends when the worker publishes the list; withdraw it
  // if the worker will not.
  ComputationId computation;

  bool found() const { return prefix.valid(); }
};

}  // namespace tessera::client
