// `Prefix` is a published prefix: a frozen sequence, never appended to, truncated or decoded, whose
// segments forks share. It belongs to the tenant and to no session.
//
// Matching finds it while its token ids are in the tenant's PrefixIndex. After that, it lives on
// for sessions that have already found it (see PrefixStore), and its segments live on in its forks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "daemon/base/clock.h"
#include "daemon/base/ids.h"
#include "daemon/cache/prefix/prefix_index.h"
#include "daemon/cache/sequence/prefix_forks.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::cache {

// How long an unused prefix is kept.
struct PrefixLife {
  Clock::Duration ttl{};  // since the last use; zero: no limit
  bool pinned = false;    // kept until it is freed by name
};

class Prefix {
 public:
  struct Options {
    std::shared_ptr<Sequence> sequence;  // a frozen fork, held only here
    PrefixChain chain;
    std::string policy;
    std::uint32_t rank = 0;
    std::uint32_t group_size = 1;
    std::uint64_t tokens = 0;
    std::uint64_t tile_bytes = 0;
    Clock::TimePoint published;
    std::shared_ptr<PrefixForks> forks;
  };
  explicit Prefix(Options options) : options_(std::move(options)) {}
  // Frees the sequence, so the last reference must be dropped without holding a lock.
  ~Prefix() { options_.sequence->Free(); }
  Prefix(const Prefix&) = delete;
  Prefix& operator=(const Prefix&) = delete;

  PrefixId id() const { return PrefixId(options_.sequence->id().value()); }
  const Options& options() const { return options_; }
  Sequence& sequence() const { return *options_.sequence; }
  std::uint64_t tokens() const { return options_.tokens; }

  // True if a fork may take exactly the first `tokens` tokens.
  bool MayEndAt(std::uint64_t tokens) const {
    return tokens == options_.tokens || (options_.chain.every_boundary && tokens > 0 &&
                                         tokens < options_.tokens && tokens % kPrefixBlock == 0);
  }

 private:
  const Options options_;
};

}  // namespace tessera::cache
