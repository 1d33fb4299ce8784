#include "daemon/cache/computations.h"

#include <algorithm>
#include <utility>

namespace tessera::cache {

namespace {

std::uint64_t CommonTokens(PrefixIndex::Ids a, PrefixIndex::Ids b) {
  return static_cast<std::uint64_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                                    a.begin());
}

std::uint64_t WholeBlocks(std::uint64_t tokens) { return tokens - tokens % kPrefixBlock; }

}  // namespace

ComputationId Computations::Add(Computation computation, bool& dropped) {
  std::size_t held = 0;
  auto oldest = computations_.end();
  for (auto it = computations_.begin(); it != computations_.end(); ++it) {
    if (it->session != computation.session) continue;
    if (it->chain.start == computation.chain.start && it->tokens->ids == computation.tokens->ids) {
      return it->id;
    }
    if (held++ == 0) oldest = it;
  }
  dropped = held >= kMostOfASession;
  if (dropped) computations_.erase(oldest);
  computations_.push_back(std::move(computation));
  return computations_.back().id;
}

bool Computations::Withdraw(ComputationId id, SessionId session) {
  return std::erase_if(computations_, [&](const Computation& computation) {
           return computation.id == id && computation.session == session;
         }) > 0;
}

bool Computations::EndSession(SessionId session) {
  return std::erase_if(computations_, [&](const Computation& computation) {
           return computation.session == session;
         }) > 0;
}

bool Computations::Published(SessionId session, const PrefixChain& chain, PrefixIndex::Ids ids) {
  return std::erase_if(computations_, [&](const Computation& computation) {
           const PrefixIndex::Ids said = computation.tokens->ids;
           if (computation.session != session || computation.chain.start != chain.start) {
             return false;
           }
           const std::uint64_t common = CommonTokens(said, ids);
           return common == said.size() || (chain.every_boundary && common >= kPrefixBlock &&
                                            common >= WholeBlocks(said.size()));
         }) > 0;
}

std::uint64_t Computations::Longest(const std::string& asker, const PrefixChain& chain,
                                    PrefixIndex::Ids ids, std::uint64_t limit) const {
  std::uint64_t longest = 0;
  ids = ids.first(std::min<std::uint64_t>(ids.size(), limit));
  for (const Computation& computation : computations_) {
    if (computation.asker == asker || computation.chain.start != chain.start) continue;
    const PrefixIndex::Ids said = computation.tokens->ids;
    const std::uint64_t common = CommonTokens(said, ids);
    if (common == said.size()) {
      longest = std::max(longest, common);
    } else if (chain.every_boundary) {
      longest = std::max(longest, WholeBlocks(common));
    }
  }
  return longest;
}

}  // namespace tessera::cache
