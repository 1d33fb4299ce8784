// Heads that sessions have said they compute and will publish: what others may wait for instead of
// computing it again. Few at a time, so that looking for one goes through all of them.
//
// Not thread-safe; PrefixStore has the lock.
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

// Of a call; shared by all that remember it. Charged once it is remembered.
class TokenList {
 public:
  explicit TokenList(std::vector<std::uint32_t> tokens) : ids(std::move(tokens)) {}

  const std::vector<std::uint32_t> ids;
  pool::Charge charge;

  // Of the ids up to the end of each whole block, made when it is first asked for. Under the lock
  // of whoever shares the list.
  const std::vector<Hash128>& heads() const;
  std::uint64_t bytes() const {
    return ids.size() * sizeof(std::uint32_t) + ids.size() / kPrefixBlock * sizeof(Hash128);
  }

 private:
  mutable std::vector<Hash128> heads_;
};

class Computations {
 public:
  // Of one session; the oldest goes.
  static constexpr std::size_t kMostOfASession = 64;

  struct Computation {
    ComputationId id;
    SessionId session;
    std::string asker;  // the session, or its group: to whom it is not somebody else's
    PrefixChain chain;
    std::shared_ptr<const TokenList> tokens;
  };
  // The id of the one that the session has of this list, or else of the new one. True in `dropped`
  // where another one went for it.
  ComputationId Add(Computation computation, bool& dropped);
  // Each returns whether one went.
  bool Withdraw(ComputationId id, SessionId session);
  bool EndSession(SessionId session);
  // The session has published this head: what it said it would, or all whole blocks of that.
  bool Published(SessionId session, const PrefixChain& chain, PrefixIndex::Ids ids);

  // How much of the list, `limit` tokens at most, will match a prefix when those that others than
  // `asker` compute are published. Long heads that have much in common cost no more than others:
  // hashes say how much, and of whichever has most the ids are compared.
  std::uint64_t Longest(const std::string& asker, const PrefixChain& chain, const TokenList& tokens,
                        std::uint64_t limit) const;
  std::size_t size() const { return computations_.size(); }

 private:
  std::list<Computation> computations_;  // the oldest first
};

}  // namespace tessera::cache
