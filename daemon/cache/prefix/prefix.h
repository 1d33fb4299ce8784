// A published head: a sequence of its own that nobody appends to, cuts or decodes, whose segments
// forks share. It belongs to the tenant and to no session.
//
// Its token ids are in the tenant's PrefixIndex. While it is there the prefix is found; it lives on
// for whoever has found it (PrefixStore), and its segments live on in what was forked from it.
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

// How long a prefix stays that nobody uses.
struct PrefixLife {
  Clock::Duration ttl{};  // since it was last used; zero: no limit
  bool pinned = false;    // stays until it is freed by name
};

class Prefix {
 public:
  struct Options {
    std::shared_ptr<Sequence> sequence;  // frozen: a fork that nobody else has
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
  // The last holder's: under no lock.
  ~Prefix() { options_.sequence->Free(); }
  Prefix(const Prefix&) = delete;
  Prefix& operator=(const Prefix&) = delete;

  PrefixId id() const { return PrefixId(options_.sequence->id().value()); }
  const Options& options() const { return options_; }
  Sequence& sequence() const { return *options_.sequence; }
  std::uint64_t tokens() const { return options_.tokens; }

  // Whether it can be forked with so many tokens.
  bool MayEndAt(std::uint64_t tokens) const {
    return tokens == options_.tokens || (options_.chain.every_boundary && tokens > 0 &&
                                         tokens < options_.tokens && tokens % kPrefixBlock == 0);
  }

 private:
  const Options options_;
};

}  // namespace tessera::cache
