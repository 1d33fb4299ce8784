// Prefixes that sessions have announced they are computing and will publish, so that others can
// wait instead of computing them again. There are few at a time, so a lookup scans all of them.
//
// Not thread-safe; guarded by PrefixStore's lock.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "daemon/cache/prefix/prefix_index.h"
#include "daemon/pool/account.h"

namespace tessera::cache {

// The token ids of one call, shared by everything that remembers it. Charged when first remembered.
class TokenList {
 public:
  explicit TokenList(std::vector<std::uint32_t> tokens) : ids(std::move(tokens)) {}

  const std::vector<std::uint32_t> ids;
  pool::Charge charge;

  // The chained hash up to the end of each whole block, computed on first use. Callers must hold
  // the lock of the list's owner.
  const std::vector<Hash128>& heads() const;
  std::uint64_t bytes() const {
    return ids.size() * sizeof(std::uint32_t) + ids.size() / kPrefixBlock * sizeof(Hash128);
  }

 private:
  mutable std::vector<Hash128> heads_;
};

class Computations {
 public:
  // Per session; beyond it, the oldest computation is dropped.
  static constexpr std::size_t kMaxPerSession = 64;

  struct Computation {
    ComputationId id;
    SessionId session;
    std::string asker;  // the session, or its tensor-parallel group; it never waits for itself
    PrefixChain chain;
    std::shared_ptr<const TokenList> tokens;
  };
  // Returns the id of the session's existing computation of this list, or of the new one. Sets
  // `dropped` if an older one was dropped to make room.
  ComputationId Add(Computation computation, bool& dropped);
  // Both return whether a computation was removed.
  bool Withdraw(ComputationId id, SessionId session);
  bool EndSession(SessionId session);
  // The session has published a prefix: removes its computations of which the prefix has all
  // tokens, or all whole blocks. Returns whether one was removed.
  bool Published(SessionId session, const PrefixChain& chain, PrefixIndex::Ids ids);

  // Returns how many leading tokens of the list, at most `limit`, will match a prefix once the
  // computations of other askers are published. The cost does not grow with the common length:
  // hashes find the longest candidate, and only that one's ids are compared.
  std::uint64_t Longest(const std::string& asker, const PrefixChain& chain, const TokenList& tokens,
                        std::uint64_t limit) const;
  std::size_t size() const { return computations_.size(); }

 private:
  std::list<Computation> computations_;  // oldest first
};

}  // namespace tessera::cache
