#include "daemon/cache/prefix/prefix_index.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::cache {
namespace {

using Ids = std::vector<std::uint32_t>;
using pool::MemoryTag;

// The expected index, which compares with every prefix.
class Plain {
 public:
  void Insert(const PrefixChain& chain, const Ids& ids, PrefixId id) {
    prefixes_[id] = {chain.start, ids};
  }
  void Erase(PrefixId id) { prefixes_.erase(id); }
  PrefixId FindEnd(const PrefixChain& chain, const Ids& ids) const {
    for (const auto& [id, prefix] : prefixes_) {
      if (prefix == std::pair(chain.start, ids)) return id;
    }
    return PrefixId();
  }
  std::uint64_t Longest(const PrefixChain& chain, const Ids& ids, std::uint64_t limit) const {
    std::uint64_t longest = 0;
    const std::uint64_t most = std::min<std::uint64_t>(limit, ids.size());
    for (const auto& [id, prefix] : prefixes_) {
      const auto& [start, held] = prefix;
      if (start != chain.start) continue;
      for (std::uint64_t tokens = 1; tokens <= std::min<std::uint64_t>(most, held.size());
           ++tokens) {
        if (ids[tokens - 1] != held[tokens - 1]) break;
        const bool ends = tokens == held.size();
        if (ends || (chain.every_boundary && tokens % 32 == 0)) longest = std::max(longest, tokens);
      }
    }
    return longest;
  }
  bool Has(PrefixId id, const PrefixChain& chain, const Ids& ids, std::uint64_t tokens) const {
    const auto it = prefixes_.find(id);
    if (it == prefixes_.end() || it->second.first != chain.start) return false;
    const Ids& held = it->second.second;
    return held.size() >= tokens && std::equal(ids.begin(), ids.begin() + tokens, held.begin());
  }
  PrefixId Any(TestRandom& random) const {
    auto it = prefixes_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(random.Below(prefixes_.size())));
    return it->first;
  }
  const Ids& IdsOf(PrefixId id) const { return prefixes_.at(id).second; }
  std::size_t size() const { return prefixes_.size(); }

 private:
  std::map<PrefixId, std::pair<std::string, Ids>> prefixes_;
};

// Blocks of few kinds, so that lists share prefixes; sometimes one token differs.
Ids NewList(TestRandom& random, const Plain& plain) {
  Ids ids;
  if (plain.size() > 0 && random.OneIn(2)) {
    ids = plain.IdsOf(plain.Any(random));
    ids.resize(random.Between(1, ids.size()));
    if (random.OneIn(2)) ids.resize(std::max<std::size_t>(ids.size() / 32 * 32, 1));
  }
  for (std::uint64_t blocks = random.Below(4); blocks > 0; --blocks) {
    ids.insert(ids.end(), 32, static_cast<std::uint32_t>(random.Below(2)));
  }
  for (std::uint64_t rest = random.OneIn(2) ? random.Below(40) : 0; rest > 0; --rest) {
    ids.push_back(static_cast<std::uint32_t>(random.Below(2)));
  }
  if (ids.empty()) ids.push_back(7);
  if (random.OneIn(8)) ids[random.Below(ids.size())] ^= 0x80000000u;
  return ids;
}

void CompareWithPlain(const PrefixHash& hash, TestRandom& random, int operations) {
  pool::Account account("test", 0);
  Plain plain;
  std::uint64_t next = 1;
  {
    PrefixIndex index({.hash = hash, .account = &account});
    std::multiset<std::uint64_t> blocks;  // as events tell them
    std::vector<BlockEvent> events;
    const auto apply = [&] {
      for (const BlockEvent& event : events) {
        if (event.stored) {
          blocks.insert(event.hash);
        } else {
          ASSERT_TRUE(blocks.contains(event.hash));
          blocks.erase(blocks.find(event.hash));
        }
        if (event.parent.has_value()) {
          ASSERT_TRUE(blocks.contains(*event.parent));
        }
      }
      events.clear();
      std::multiset<std::uint64_t> there;
      index.VisitBlocks([&](const PrefixChain&, const std::vector<BlockEvent>& some) {
        for (const BlockEvent& event : some) {
          if (event.parent.has_value()) {
            ASSERT_TRUE(there.contains(*event.parent));
          }
          there.insert(event.hash);
        }
      });
      ASSERT_EQ(blocks, there);
    };
    const std::vector<PrefixChain> chains = {
        {.start = "a", .every_boundary = true, .model = "m"},
        {.start = "b", .model = "m"},
        {.start = "a b", .every_boundary = true, .model = "n"}};
    for (int i = 0; i < operations; ++i) {
      const PrefixChain& chain = random.Pick(chains);
      const Ids ids = NewList(random, plain);
      const bool full = plain.size() >= 24;
      if (plain.size() > 0 && (full || random.OneIn(4))) {
        const PrefixId gone = plain.Any(random);
        plain.Erase(gone);
        index.Erase(gone, &events);
      } else if (!plain.FindEnd(chain, ids).valid() && random.OneIn(2)) {
        const PrefixId id(next++);
        plain.Insert(chain, ids, id);
        ASSERT_TRUE(index.Insert(chain, ids, id, &events).ok());
      }
      ASSERT_NO_FATAL_FAILURE(apply());
      index.Validate();
      ASSERT_EQ(index.FindEnd(chain, ids), plain.FindEnd(chain, ids));
      const std::uint64_t limit = random.OneIn(2) ? ids.size() : random.Below(ids.size() + 2);
      const PrefixIndex::Match match = index.Longest(chain, ids, limit);
      ASSERT_EQ(match.tokens, plain.Longest(chain, ids, limit)) << "operation " << i;
      ASSERT_EQ(match.prefix.valid(), match.tokens > 0);
      if (match.tokens > 0) {
        ASSERT_TRUE(plain.Has(match.prefix, chain, ids, match.tokens)) << "operation " << i;
      }
    }
    while (plain.size() > 0) {
      const PrefixId gone = plain.Any(random);
      plain.Erase(gone);
      index.Erase(gone);
      index.Validate();
    }
    EXPECT_EQ(index.nodes(), 0u);
    EXPECT_EQ(index.chains(), 0u);
  }
  EXPECT_EQ(account.used_bytes(), 0u);
}

TEST(PrefixIndexProperty, SaysWhatLookingAtAllOfThemSays) {
  TestRandom random;
  CompareWithPlain(NewPrefixHash(random.Bits()), random, 3000);
}

// Results are the same with hashes that collide often or always.
TEST(PrefixIndexProperty, AHashIsNeverTrusted) {
  TestRandom random;
  CompareWithPlain([](const Hash128&, const void*, std::size_t) { return Hash128(); }, random,
                   1500);
  CompareWithPlain(
      [hash = NewPrefixHash(1)](const Hash128& before, const void* data, std::size_t bytes) {
        return Hash128{.low = hash(before, data, bytes).low % 3, .high = 0};
      },
      random, 1500);
  // Hashes that depend on blocks but not on their place.
  CompareWithPlain(
      [hash = NewPrefixHash(1)](const Hash128&, const void* data, std::size_t bytes) {
        return hash(Hash128(), data, bytes);
      },
      random, 1500);
}

Ids Count(std::uint32_t tokens, std::uint32_t from = 0) {
  Ids ids(tokens);
  for (std::uint32_t i = 0; i < tokens; ++i) ids[i] = from + i;
  return ids;
}

TEST(PrefixIndex, SharedBlocksAreKeptOnce) {
  pool::Account account("test", 0);
  PrefixIndex index({.hash = NewPrefixHash(0), .account = &account});
  const PrefixChain chain = {"a", true};
  ASSERT_TRUE(index.Insert(chain, Count(96), PrefixId(1)).ok());
  EXPECT_EQ(index.nodes(), 3u);
  const std::uint64_t one = account.used_bytes(MemoryTag::kPrefixIndex);
  Ids other = Count(96);
  other.back() = 1000;
  ASSERT_TRUE(index.Insert(chain, other, PrefixId(2)).ok());
  EXPECT_EQ(index.nodes(), 4u);
  EXPECT_EQ(account.used_bytes(MemoryTag::kPrefixIndex), one + PrefixIndex::NodeBytes());
  ASSERT_TRUE(index.Insert(chain, Count(64), PrefixId(3)).ok());
  EXPECT_EQ(index.nodes(), 4u);
  // When the first prefix is gone, its shared blocks are still found through the others.
  index.Erase(PrefixId(1));
  EXPECT_EQ(index.Longest(chain, Count(96), 96).tokens, 64u);
  EXPECT_EQ(index.Longest(chain, Count(96), 96).prefix, PrefixId(3));
  EXPECT_EQ(index.Longest(chain, Count(96), 40).tokens, 32u);
  index.Erase(PrefixId(3));
  EXPECT_EQ(index.Longest(chain, Count(96), 96).prefix, PrefixId(2));
}

TEST(PrefixIndex, UnderATokenPolicyOnlyEndsMatch) {
  pool::Account account("test", 0);
  PrefixIndex index({.hash = NewPrefixHash(0), .account = &account});
  const PrefixChain chain = {"a", false};
  ASSERT_TRUE(index.Insert(chain, Count(100), PrefixId(1)).ok());
  ASSERT_TRUE(index.Insert(chain, Count(40), PrefixId(2)).ok());
  EXPECT_EQ(index.Longest(chain, Count(99), 99).tokens, 40u);
  EXPECT_EQ(index.Longest(chain, Count(99), 99).prefix, PrefixId(2));
  EXPECT_EQ(index.Longest(chain, Count(200), 200).tokens, 100u);
  EXPECT_EQ(index.Longest(chain, Count(39), 39).tokens, 0u);
}

TEST(PrefixIndex, NothingIsLeftOfOneThatFindsNoRoom) {
  for (std::uint64_t nodes = 0; nodes < 6; ++nodes) {
    const PrefixChain chain = {"a", true};
    pool::Account account(
        "test", nodes * (PrefixIndex::NodeBytes() + 8) + PrefixIndex::ChainBytes(chain) + 1);
    PrefixIndex index({.hash = NewPrefixHash(0), .account = &account});
    const bool first = index.Insert(chain, Count(32), PrefixId(1)).ok();
    EXPECT_EQ(first, nodes >= 2);
    const std::uint64_t used = account.used_bytes();
    const absl::Status status = index.Insert(chain, Count(32 * 5 + 4), PrefixId(2));
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    index.Validate();
    EXPECT_EQ(account.used_bytes(), used);
    EXPECT_EQ(index.nodes(), first ? 1u : 0u);
    EXPECT_EQ(index.chains(), first ? 1u : 0u);
  }
}

// Nodes of one installation find each other's prefixes, so the chain of hashes is part of the
// contract.
TEST(PrefixHash, ItsValuesAreFixed) {
  const PrefixHash hash = NewPrefixHash(0);
  const Hash128 start = hash(Hash128(), "start", 5);
  const Ids block = Count(32);
  const Hash128 one = hash(start, block.data(), block.size() * 4);
  const Hash128 two = hash(one, block.data(), block.size() * 4);
  // From libxxhash 0.8, over low word, high word and bytes.
  EXPECT_EQ(start.low, 0x8d71348778f92b5au);
  EXPECT_EQ(start.high, 0xb1819ad3625bb076u);
  EXPECT_EQ(one.low, 0x1ce995400ed0b2eeu);
  EXPECT_EQ(one.high, 0xaef011658a9f0dd4u);
  EXPECT_FALSE(one == two);
  EXPECT_FALSE(NewPrefixHash(1)(start, block.data(), 128) == one);
  // Long texts are hashed like short ones.
  const std::string text(1000, 'x');
  EXPECT_FALSE(hash(Hash128(), text.data(), 999) == hash(Hash128(), text.data(), 1000));
}

}  // namespace
}  // namespace tessera::cache
