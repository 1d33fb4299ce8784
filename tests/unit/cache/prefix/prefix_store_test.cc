#include "daemon/cache/prefix/prefix_store.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/fakes/seed.h"
#include "tests/unit/cache/prefix/prefix_fixture.h"

namespace tessera::cache {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;

class Prefixes : public PrefixFixture {};

TEST_F(Prefixes, AHeadIsFoundAndForkedAtEveryBoundary) {
  {
    const auto giver = world_.OpenSession();
    const auto taker = world_.OpenSession();
    const Ids ids = Count(100);
    const PrefixId id = PublishNew(*giver, ids);
    tenant().EndSession(giver->id());

    for (const auto& [asked, expected] :
         {std::pair(31, 0), {32, 32}, {63, 32}, {64, 64}, {99, 96}, {100, 100}, {400, 100}}) {
      Ids list = Count(static_cast<std::uint32_t>(asked));
      const Asked match = Match(*taker, list);
      ASSERT_FALSE(match.waits());
      EXPECT_EQ(match.answer().tokens, static_cast<std::uint64_t>(expected)) << asked;
      EXPECT_EQ(match.answer().prefix, expected == 0 ? PrefixId() : id);
    }
    Ids other = Count(100);
    other[40] = 4000000000u;
    EXPECT_EQ(Match(*taker, other).answer().tokens, 32u);

    const std::uint64_t tiles = TileBytes();
    for (const std::uint32_t tokens : {32u, 96u, 100u}) {
      const auto fork = Fork(*taker, id, tokens);
      ASSERT_TRUE(fork.ok()) << fork.status();
      EXPECT_EQ(Differs(**fork, Count(tokens)), "");
      EXPECT_EQ(TileBytes(), tiles) << "KV was copied";
      // The sequence continues, and the prefix does not change.
      ASSERT_TRUE(AppendAll(**fork, tokens, StampsOf(Count(9, 777))).ok());
      Ids longer = Count(tokens);
      for (const std::uint32_t more : Count(9, 777)) longer.push_back(more);
      EXPECT_EQ(Differs(**fork, longer), "");
      ASSERT_TRUE(tenant().FreeSequence((*fork)->id()).ok());
      EXPECT_EQ(TileBytes(), tiles);
    }
    const auto whole = Fork(*taker, id, 100);
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_EQ(Differs(**whole, ids), "");
    const absl::StatusOr<PrefixStore::ForFork> from = store().TakeForFork(id, taker->id());
    ASSERT_TRUE(from.ok());
    for (const std::uint64_t tokens : {0u, 1u, 33u, 99u, 101u, 128u}) {
      EXPECT_FALSE(from->prefix->MayEndAt(tokens)) << tokens;
    }
    // Workers cannot access it: it is not one of the tenant's sequences.
    EXPECT_TRUE(absl::IsNotFound(tenant().FindSequence(SequenceId(id.value())).status()));
  }
}

TEST_F(Prefixes, ATokenPolicysHeadIsFoundAtItsEndAlone) {
  const auto session = world_.OpenSession();
  const PrefixId id =
      PublishNew(*session, Count(96), {.policy = "h2o", .keeps_every_token = false});
  const Ask ask = {.policy = "h2o", .keeps_every_token = false};
  EXPECT_EQ(Match(*session, Count(95), ask).answer().tokens, 0u);
  EXPECT_EQ(Match(*session, Count(64), ask).answer().tokens, 0u);
  EXPECT_EQ(Match(*session, Count(128), ask).answer().prefix, id);
  // Another policy or another model has other prefixes.
  EXPECT_EQ(Match(*session, Count(128)).answer().tokens, 0u);
  const auto from = store().TakeForFork(id, session->id());
  ASSERT_TRUE(from.ok());
  EXPECT_TRUE(from->prefix->MayEndAt(96));
  EXPECT_FALSE(from->prefix->MayEndAt(64));
}

TEST_F(Prefixes, TwoThatPublishTheSameEndWithOneCopy) {
  {
    const auto first = world_.OpenSession();
    const auto second = world_.OpenSession();
    const Ids ids = Count(200);
    const auto one = Compute(*first, ids);
    const auto published = Publish(*first, *one, ids);
    ASSERT_TRUE(published.ok());
    EXPECT_FALSE(published->existed);
    const std::uint64_t tiles = TileBytes();
    const auto two = Compute(*second, ids);
    EXPECT_EQ(TileBytes(), 2 * tiles);
    const auto again = Publish(*second, *two, ids);
    ASSERT_TRUE(again.ok());
    EXPECT_TRUE(again->existed);
    EXPECT_EQ(again->prefix, published->prefix);
    ASSERT_TRUE(two->AdoptPrefix(again->prefix->sequence()).ok());
    EXPECT_EQ(TileBytes(), tiles);
    EXPECT_EQ(Differs(*two, ids), "");
    EXPECT_EQ(store().figures().prefixes, 1u);
    EXPECT_EQ(store().figures().deduplicated, 1u);
    // Both can continue.
    for (const auto& sequence : {one, two}) {
      ASSERT_TRUE(AppendAll(*sequence, 200, StampsOf(Count(50, 200))).ok());
      EXPECT_EQ(Differs(*sequence, Count(250)), "");
    }
    // A sequence with fewer tokens adopts nothing.
    const auto fewer = Compute(*first, Count(199));
    EXPECT_TRUE(absl::IsFailedPrecondition(fewer->AdoptPrefix(again->prefix->sequence()).status()));
    ASSERT_TRUE(store().Free(again->prefix->id()));
    EXPECT_EQ(Differs(*two, Count(250)), "");
  }
}

// For any end of the prefix: between tiles, inside one, inside the only one.
TEST_F(Prefixes, WhatComesBehindAHeadStaysWithItsSequence) {
  {
    const auto session = world_.OpenSession();
    for (const std::uint32_t head : {1u, 31u, 32u, 64u, 70u, 128u, 199u}) {
      const PrefixId id = PublishNew(*session, Count(head));
      const auto from = store().TakeForFork(id, session->id());
      ASSERT_TRUE(from.ok());
      const Sequence& published = from->prefix->sequence();
      const std::uint64_t shared = TileBytes();
      const auto sequence = Compute(*session, Count(200));
      const auto fork = tenant().Fork(*session, sequence->id());
      ASSERT_TRUE(fork.ok()) << fork.status();
      ASSERT_TRUE(AppendAll(*sequence, 200, StampsOf(Count(10, 200))).ok());
      ASSERT_TRUE(sequence->AdoptPrefix(published).ok());
      EXPECT_EQ(Differs(*sequence, Count(210)), "") << head;
      EXPECT_EQ(Differs(**fork, Count(200)), "") << head;
      ASSERT_TRUE(tenant().FreeSequence((*fork)->id()).ok());
      // One copy of the prefix, and as many other tiles as the remaining rows need.
      const std::uint64_t tile = published.Describe(false).tile_bytes / ((head + 31) / 32);
      // Plus one, where ten rows were appended.
      const std::uint64_t rest = (200 - head + 31) / 32 + 1;
      EXPECT_LE(TileBytes(), shared + rest * tile) << head;
      // A repetition has nothing to do and copies nothing.
      const std::uint64_t tiles = TileBytes();
      ASSERT_TRUE(sequence->AdoptPrefix(published).ok());
      EXPECT_EQ(TileBytes(), tiles) << head;
      // It can continue, and be cut on both sides of the prefix's end.
      ASSERT_TRUE(AppendAll(*sequence, 210, StampsOf(Count(50, 210))).ok());
      EXPECT_EQ(Differs(*sequence, Count(260)), "") << head;
      for (const std::uint32_t left : {head + 1, head, head - 1}) {
        ASSERT_TRUE(sequence->Truncate(left).ok());
        EXPECT_EQ(Differs(*sequence, Count(left)), "") << head;
      }
      ASSERT_TRUE(tenant().FreeSequence(sequence->id()).ok());
      ASSERT_TRUE(store().Free(id));
    }
  }
}

TEST_F(Prefixes, ADecodingSequenceTakesOverWhatIsBeforeItsTail) {
  {
    const auto session = world_.OpenSession();
    const Ids ids = Count(64);
    const PrefixId id = PublishNew(*session, ids);
    const std::uint64_t tiles = TileBytes();
    const auto sequence = Compute(*session, ids);
    TestWorker worker(tenant(), session);
    const auto tail = worker.Open(*sequence);
    ASSERT_TRUE(tail.ok());
    const Stamps next = StampsOf(Count(3, 64));
    for (std::uint64_t i = 0; i < 3; ++i) worker.Write(*sequence, *tail, 64 + i, next[i]);
    worker.Commit(*tail, 67);
    const auto from = store().TakeForFork(id, session->id());
    ASSERT_TRUE(sequence->AdoptPrefix(from->prefix->sequence()).ok());
    EXPECT_EQ(TileBytes(), tiles);
    EXPECT_EQ(Differs(*sequence, Count(67)), "");
    ASSERT_TRUE(sequence->CloseTail().ok());
    EXPECT_EQ(Differs(*sequence, Count(67)), "");
  }
}

// ---- Lifetime

TEST_F(Prefixes, ReferencesAreLiveSequencesThatCameFromIt) {
  const auto session = world_.OpenSession();
  const PrefixId id = PublishNew(*session, Count(64));
  const auto references = [&] { return store().List()[0].prefix->options().forks->count(); };
  EXPECT_EQ(references(), 0u);
  auto fork = Fork(*session, id, 64);
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(references(), 1u);
  const auto grandchild = tenant().Fork(*session, (*fork)->id());
  ASSERT_TRUE(grandchild.ok());
  EXPECT_EQ(references(), 2u);
  EXPECT_EQ(DropLeastRecentlyUsed(), std::nullopt);
  ASSERT_TRUE(tenant().FreeSequence((*fork)->id()).ok());
  EXPECT_EQ(DropLeastRecentlyUsed(), std::nullopt);
  ASSERT_TRUE(tenant().FreeSequence((*grandchild)->id()).ok());
  EXPECT_EQ(references(), 0u);
  // 2 lanes of 2 tiles.
  EXPECT_EQ(DropLeastRecentlyUsed(), std::optional<std::uint64_t>(2 * 2 * 8192));
  EXPECT_EQ(TileBytes(), 0u);
  EXPECT_EQ(IndexBytes(), 0u);
}

TEST_F(Prefixes, TheLeastRecentlyUsedGoesFirst) {
  const auto session = world_.OpenSession();
  const PrefixId a = PublishNew(*session, Count(32, 1000));
  const PrefixId b = PublishNew(*session, Count(32, 2000));
  const PrefixId c = PublishNew(*session, Count(32, 3000));
  const PrefixId d = PublishNew(*session, Count(32, 4000), {.life = {.pinned = true}});
  // Used again: a by a match, b by another publication.
  EXPECT_EQ(Match(*session, Count(40, 1000)).answer().prefix, a);
  EXPECT_EQ(PublishNew(*session, Count(32, 2000)), b);
  const auto found = [&](std::uint32_t from) {
    const auto chain = *store().ChainOf(session->id(), Scope());
    return store().Find(chain, Count(32, from)) != nullptr;
  };
  EXPECT_TRUE(DropLeastRecentlyUsed().has_value());
  EXPECT_FALSE(found(3000)) << c;
  // A match is kept for its finder for a while.
  EXPECT_TRUE(DropLeastRecentlyUsed().has_value());
  EXPECT_FALSE(found(2000));
  EXPECT_EQ(DropLeastRecentlyUsed(), std::nullopt);
  Pass(PrefixStore::kKept);
  EXPECT_TRUE(DropLeastRecentlyUsed().has_value());
  EXPECT_FALSE(found(1000));
  EXPECT_TRUE(found(4000));
  EXPECT_EQ(DropLeastRecentlyUsed(), std::nullopt);
  EXPECT_TRUE(store().Free(d));
  EXPECT_FALSE(store().Free(d));
  EXPECT_EQ(store().figures().dropped[1], 3u);
  EXPECT_EQ(store().figures().dropped[2], 1u);
}

TEST_F(Prefixes, TimePassesForThoseThatNobodyUses) {
  const auto session = world_.OpenSession();
  const PrefixId id = PublishNew(*session, Count(64), {.life = {.ttl = seconds(60)}});
  EXPECT_EQ(store().Sweep(), std::optional<Clock::Duration>(seconds(60)));
  PublishNew(*session, Count(64, 500));  // no limit
  PublishNew(*session, Count(64, 900), {.life = {.ttl = seconds(1), .pinned = true}});
  Pass(seconds(59));
  EXPECT_EQ(store().figures().prefixes, 3u);
  const auto fork = Fork(*session, id, 32);
  ASSERT_TRUE(fork.ok());
  Pass(seconds(61));
  EXPECT_EQ(store().figures().prefixes, 3u) << "it went under a fork";
  const int asked = world_.attention();
  ASSERT_TRUE(tenant().FreeSequence((*fork)->id()).ok());
  EXPECT_GT(world_.attention(), asked) << "nobody was told that its time has come";
  Pass(seconds(0));
  EXPECT_EQ(store().figures().prefixes, 2u);
  EXPECT_EQ(store().figures().dropped[0], 1u);
  // A use restarts the time; the longer lifetime wins.
  const PrefixId other = PublishNew(*session, Count(64, 77), {.life = {.ttl = seconds(10)}});
  EXPECT_EQ(PublishNew(*session, Count(64, 77), {.life = {.ttl = seconds(5)}}), other);
  Pass(seconds(9));
  EXPECT_EQ(Match(*session, Count(64, 77)).answer().prefix, other);
  Pass(seconds(9));
  EXPECT_EQ(store().figures().prefixes, 3u);
  Pass(seconds(22));
  EXPECT_EQ(store().figures().prefixes, 2u) << "kept no longer, and over its time";
  EXPECT_EQ(PublishNew(*session, Count(64, 77), {.life = {.ttl = seconds(5)}}).valid(), true);
  PublishNew(*session, Count(64, 77));
  Pass(seconds(100000));
  EXPECT_EQ(store().figures().prefixes, 3u) << "published again without a limit";
}

// Compared with a list of lifetimes, for any order of extending, pinning and using.
TEST_F(Prefixes, EachGoesWhenItsOwnTimeHasPassed) {
  struct Said {
    PrefixId id;
    PrefixLife life;
    seconds used{0};
  };
  TestRandom random;
  const auto below = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random.Below(n)); };
  const auto session = world_.OpenSession();
  std::map<std::uint32_t, Said> live;
  seconds now{0};
  for (int round = 0; round < 400; ++round) {
    const std::uint32_t which = below(30);
    const PrefixLife life = {.ttl = seconds(below(4) == 0 ? 0 : 1 + below(60)),
                             .pinned = below(40) == 0};
    const PrefixId id = PublishNew(*session, Count(32, 1000 * which), {.life = life});
    Said& said = live.try_emplace(which, Said{id, life, now}).first->second;
    ASSERT_EQ(said.id, id) << "it was there";
    said.used = now;
    said.life.pinned |= life.pinned;
    const bool for_good = said.life.ttl == seconds(0) || life.ttl == seconds(0);
    said.life.ttl = for_good ? seconds(0) : std::max(said.life.ttl, life.ttl);
    const seconds passed(below(6));
    Pass(passed);
    now += passed;
    std::erase_if(live, [&](const auto& entry) {
      const PrefixLife& of = entry.second.life;
      return !of.pinned && of.ttl != seconds(0) && entry.second.used + of.ttl <= now;
    });
    std::set<PrefixId> expected;
    for (const auto& [key, of] : live) expected.insert(of.id);
    std::set<PrefixId> found;
    for (const PrefixStore::Description& of : store().List()) found.insert(of.prefix->id());
    ASSERT_EQ(found, expected) << "round " << round;
    // Frees some by hand: otherwise only unlimited ones would be left eventually.
    if (below(3) != 0 || found.empty()) continue;
    const PrefixId gone = store().List().front().prefix->id();
    ASSERT_TRUE(store().Free(gone));
    std::erase_if(live, [gone](const auto& entry) { return entry.second.id == gone; });
  }
}

class FewPrefixes : public PrefixFixture {
 protected:
  FewPrefixes() : PrefixFixture(World::Options{.max_prefixes = 2}) {}
};

TEST_F(FewPrefixes, AtTheLimitOneMakesRoomOrNoneComes) {
  const auto session = world_.OpenSession();
  const PrefixId a = PublishNew(*session, Count(32, 1000));
  const PrefixId b = PublishNew(*session, Count(32, 2000));
  const PrefixId c = PublishNew(*session, Count(32, 3000));
  EXPECT_FALSE(store().Free(a));
  const auto fork = Fork(*session, b, 32);
  ASSERT_TRUE(fork.ok());
  PublishNew(*session, Count(32, 3000), {.life = {.pinned = true}});
  const auto sequence = Compute(*session, Count(32, 4000));
  const auto refused = Publish(*session, *sequence, Count(32, 4000));
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("has 2 prefixes; the limit is 2. 1 are pinned"));
  ASSERT_TRUE(store().Free(c));
  EXPECT_TRUE(Publish(*session, *sequence, Count(32, 4000)).ok());
}

TEST_F(Prefixes, WhatWasFoundCanBeForkedThoughItIsFreed) {
  {
    const auto session = world_.OpenSession();
    const auto other = world_.OpenSession();
    const PrefixId id = PublishNew(*session, Count(64));
    ASSERT_EQ(Match(*session, Count(70)).answer().prefix, id);
    ASSERT_TRUE(store().Free(id));
    EXPECT_EQ(Match(*session, Count(70)).answer().tokens, 0u);
    EXPECT_TRUE(absl::IsNotFound(Fork(*other, id, 64).status()));
    const auto fork = Fork(*session, id, 64);
    ASSERT_TRUE(fork.ok()) << fork.status();
    EXPECT_EQ(Differs(**fork, Count(64)), "");
    EXPECT_TRUE(absl::IsNotFound(Fork(*session, id, 64).status())) << "it was found once";
  }
}

TEST_F(Prefixes, AForkThatIsRefusedHasNotTakenWhatWasFound) {
  const auto session = world_.OpenSession();
  const PrefixId id = PublishNew(*session, Count(64));
  ASSERT_EQ(Match(*session, Count(70)).answer().prefix, id);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(store().TakeForFork(id, session->id()).ok());  // without forking it
    EXPECT_EQ(DropLeastRecentlyUsed(), std::nullopt) << "it is kept for the session";
  }
  EXPECT_TRUE(Fork(*session, id, 64).ok());
  for (const auto& sequence : tenant().Sequences()) {
    EXPECT_TRUE(tenant().FreeSequence(sequence->id()).ok());
  }
  EXPECT_TRUE(DropLeastRecentlyUsed().has_value());
}

TEST_F(Prefixes, NoSessionFindsSoMuchThatNothingMayGo) {
  const auto session = world_.OpenSession();
  for (std::uint32_t i = 0; i < PrefixStore::kMaxKeptPerSession + 10; ++i) {
    PublishNew(*session, Count(32, 1000 * i));
    Match(*session, Count(32, 1000 * i));
  }
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(DropLeastRecentlyUsed().has_value());
  EXPECT_EQ(DropLeastRecentlyUsed(), std::nullopt);
  tenant().EndSession(session->id());
  EXPECT_TRUE(DropLeastRecentlyUsed().has_value());
}

TEST_F(PrefixFixture, SaltsSetPrefixesApart) {
  const auto text = [&](const std::string& policy, const std::string& salt) {
    return ScopeOf("tenant-1", *model_, policy, true, salt).text;
  };
  EXPECT_EQ(text("dense", ""), ScopeOf("tenant-1", *model_, "dense", true).text);
  std::vector<std::string> all = {text("dense", ""),  text("dense", "a"),
                                  text("dense", "b"), text("dense", "1 a"),
                                  text("quest", "a"), text("dense", "a\nsalt 1 a")};
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
}

// ---- Tenants

class TwoTenants : public PrefixFixture {
 protected:
  TwoTenants() : PrefixFixture(World::Options{.tenants = 2}) { tenants_ = 2; }
};

TEST_F(TwoTenants, NeverSeeEachOthers) {
  const auto red = world_.OpenSession(0);
  const auto blue = world_.OpenSession(1);
  const auto blue_model = world_.Register(SmallModel("m", 2, 1), 1);
  const PrefixId id = PublishNew(*red, Count(64));
  PrefixStore& others = world_.tenant(1).prefixes();
  std::optional<std::uint64_t> tokens;
  others.Match({.session = blue->id(),
                .scope = ScopeOf("tenant-2", *blue_model, "dense", true),
                .ids = Count(64)},
               [&](absl::StatusOr<PrefixStore::Answer> answer) { tokens = answer->tokens; });
  EXPECT_EQ(tokens, std::optional<std::uint64_t>(0));
  EXPECT_TRUE(absl::IsNotFound(others.TakeForFork(id, blue->id()).status()));
  EXPECT_FALSE(others.Free(id));
  EXPECT_EQ(others.List().size(), 0u);
  EXPECT_EQ(world_.tenant(1).account().used_bytes(pool::MemoryTag::kPrefixIndex), 0u);
  // A session of one tenant is unknown to the other.
  EXPECT_TRUE(absl::IsUnauthenticated(
      others.ChainOf(red->id(), ScopeOf("tenant-2", *blue_model, "dense", true)).status()));
  // The tenant is part of the hash chain: even a shared index would keep tenants apart.
  EXPECT_NE(ScopeOf("tenant-1", *model_, "dense", true).text,
            ScopeOf("tenant-2", *model_, "dense", true).text);
}

}  // namespace
}  // namespace tessera::cache
