#include "daemon/cache/prefix/computations.h"

#include <algorithm>
#include <utility>

namespace tessera::cache {

namespace {

std::uint64_t CommonTokens(PrefixIndex::Ids a, PrefixIndex::Ids b) {
  return static_cast<std::uint64_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                                    a.begin());
}

std::uint64_t WholeBlocks(std::uint64_t tokens) { return tokens - tokens % kPrefixBlock; }

// Number of equal leading tokens according to the hashes of whole blocks. `b` may be the longer
// list.
std::uint64_t CommonByHeads(const TokenList& a, const TokenList& b, std::uint64_t limit) {
  const std::uint64_t shorter = std::min<std::uint64_t>({a.ids.size(), b.ids.size(), limit});
  std::uint64_t blocks = 0;
  for (std::uint64_t end = shorter / kPrefixBlock; blocks < end;) {
    const std::uint64_t middle = (blocks + end + 1) / 2;
    if (a.heads()[middle - 1] == b.heads()[middle - 1]) {
      blocks = middle;
    } else {
      end = middle - 1;
    }
  }
  const std::uint64_t begin = blocks * kPrefixBlock;
  const std::uint64_t most = std::min(shorter - begin, std::uint64_t{kPrefixBlock});
  return begin + CommonTokens(PrefixIndex::Ids(a.ids).subspan(begin, most),
                              PrefixIndex::Ids(b.ids).subspan(begin, most));
}

}  // namespace

const std::vector<Hash128>& TokenList::heads() const {
  const std::size_t blocks = ids.size() / kPrefixBlock;
  if (heads_.size() == blocks) return heads_;
  const PrefixHash hash = NewPrefixHash(0);
  heads_.reserve(blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    heads_.push_back(hash(i == 0 ? Hash128() : heads_.back(), &ids[i * kPrefixBlock],
                          kPrefixBlock * sizeof(std::uint32_t)));
  }
  return heads_;
}

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
  dropped = held >= kMaxPerSession;
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
                                    const TokenList& tokens, std::uint64_t limit) const {
  const auto matches = [&](const Computation& computation, std::uint64_t common) {
    return common == computation.tokens->ids.size() ? common
           : chain.every_boundary                   ? WholeBlocks(common)
                                                    : 0;
  };
  std::uint64_t longest = 0;
  const Computation* which = nullptr;
  for (const Computation& computation : computations_) {
    if (computation.asker == asker || computation.chain.start != chain.start) continue;
    const std::uint64_t will_match =
        matches(computation, CommonByHeads(*computation.tokens, tokens, limit));
    if (will_match <= longest) continue;
    longest = will_match;
    which = &computation;
  }
  if (which == nullptr) return 0;
  // A hash alone is not trusted: after a collision the result is "not being computed".
  const PrefixIndex::Ids ids = PrefixIndex::Ids(tokens.ids).first(longest);
  return CommonTokens(which->tokens->ids, ids) == longest ? longest : 0;
}

}  // namespace tessera::cache
