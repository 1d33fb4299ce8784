// Waiting for prefixes that others compute, and agreement among the ranks of a group.

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/fakes/seed.h"
#include "tests/unit/cache/prefix/prefix_fixture.h"

namespace tessera::cache {
namespace {

using std::chrono::seconds;

class Matches : public PrefixFixture {};

TEST_F(Matches, WhoeverWaitsIsToldWhenItIsPublished) {
  const auto first = world_.OpenSession();
  const auto second = world_.OpenSession();
  const auto third = world_.OpenSession();
  const Asked computing = Match(*first, Count(100), {.wait = seconds(10), .will_compute = true});
  ASSERT_FALSE(computing.waits()) << "nobody else computes it";
  EXPECT_EQ(computing.answer().tokens, 0u);
  EXPECT_TRUE(computing.answer().computation.valid());
  // A caller that does not wait learns how many tokens are being computed.
  const Asked told = Match(*second, Count(70));
  ASSERT_FALSE(told.waits());
  EXPECT_EQ(told.answer().computing, 64u);
  EXPECT_FALSE(told.answer().computation.valid());
  // The session that computes it does not wait for itself.
  EXPECT_FALSE(Match(*first, Count(70), {.wait = seconds(10)}).waits());
  const Asked waits = Match(*second, Count(70), {.wait = seconds(10)});
  const Asked whole = Match(*third, Count(120), {.wait = seconds(10), .will_compute = true});
  EXPECT_TRUE(waits.waits());
  EXPECT_TRUE(whole.waits());
  EXPECT_FALSE(Match(*second, Count(30), {.wait = seconds(10)}).waits()) << "less than a block";
  EXPECT_EQ(store().figures().waiting, 2u);

  // A shorter part of the announced prefix does not end the wait.
  PublishNew(*first, Count(32));
  EXPECT_TRUE(waits.waits());
  PublishNew(*first, Count(100));
  ASSERT_FALSE(waits.waits());
  ASSERT_FALSE(whole.waits());
  EXPECT_EQ(waits.answer().tokens, 64u);
  EXPECT_EQ(waits.answer().computing, 0u);
  EXPECT_EQ(whole.answer().tokens, 100u);
  EXPECT_TRUE(whole.answer().computation.valid()) << "it computes the rest";
  EXPECT_EQ(Match(*second, Count(120)).answer().computing, 120u);
}

TEST_F(Matches, AfterItsTimeAQuestionIsAnsweredWithWhatThereIs) {
  const auto first = world_.OpenSession();
  const auto second = world_.OpenSession();
  PublishNew(*first, Count(32));
  Match(*first, Count(96), {.will_compute = true});
  const int asked = world_.attention();
  const Asked waits = Match(*second, Count(96), {.wait = seconds(2), .will_compute = true});
  ASSERT_TRUE(waits.waits());
  EXPECT_GT(world_.attention(), asked) << "nobody was told when to sweep";
  EXPECT_EQ(store().Sweep(), std::optional<Clock::Duration>(seconds(2)));
  Pass(seconds(1));
  EXPECT_TRUE(waits.waits());
  Pass(seconds(1));
  ASSERT_FALSE(waits.waits());
  EXPECT_EQ(waits.answer().tokens, 32u);
  EXPECT_EQ(waits.answer().computing, 96u);
  EXPECT_TRUE(waits.answer().computation.valid()) << "both compute it now";
  EXPECT_EQ(store().figures().computations, 2u);
}

TEST_F(Matches, WhenTheComputingOneDiesOneOfThoseThatWaitComputes) {
  auto first = world_.OpenSession();
  const auto second = world_.OpenSession();
  const auto third = world_.OpenSession();
  const auto looker = world_.OpenSession();
  Match(*first, Count(96), {.will_compute = true});
  const Ask ask = {.wait = seconds(100), .will_compute = true};
  const Asked one = Match(*second, Count(96), ask);
  const Asked two = Match(*third, Count(96), ask);
  const Asked only_looks = Match(*looker, Count(96), {.wait = seconds(100)});
  tenant().EndSession(first->id());
  ASSERT_FALSE(one.waits());
  EXPECT_TRUE(one.answer().computation.valid());
  EXPECT_EQ(one.answer().tokens, 0u);
  EXPECT_TRUE(two.waits()) << "the second computes it";
  EXPECT_TRUE(only_looks.waits());
  // The computing session withdraws.
  EXPECT_FALSE(store().Withdraw(one.answer().computation, third->id())) << "not its own";
  EXPECT_TRUE(store().Withdraw(one.answer().computation, second->id()));
  EXPECT_FALSE(store().Withdraw(one.answer().computation, second->id()));
  ASSERT_FALSE(two.waits());
  EXPECT_TRUE(two.answer().computation.valid());
  PublishNew(*third, Count(96));
  ASSERT_FALSE(only_looks.waits());
  EXPECT_EQ(only_looks.answer().tokens, 96u);
}

TEST_F(Matches, NobodyIsLeftWaiting) {
  const auto first = world_.OpenSession();
  const auto second = world_.OpenSession();
  Match(*first, Count(96), {.will_compute = true});
  const Asked gone = Match(*second, Count(96), {.wait = seconds(100)});
  store().Cancel(gone.ticket);
  ASSERT_FALSE(gone.waits());
  EXPECT_TRUE(absl::IsCancelled(gone.status()));
  store().Cancel(gone.ticket);
  const Asked ended = Match(*second, Count(96), {.wait = seconds(100)});
  tenant().EndSession(second->id());
  ASSERT_FALSE(ended.waits());
  EXPECT_TRUE(absl::IsUnauthenticated(ended.status())) << ended.status();
  // A call of an ended session registers nothing.
  const Asked late = Match(*second, Count(96), {.wait = seconds(9), .will_compute = true});
  ASSERT_FALSE(late.waits());
  EXPECT_TRUE(absl::IsUnauthenticated(late.status()));
  const auto sequence = Compute(*first, Count(32));
  tenant().EndSession(first->id());
  EXPECT_TRUE(absl::IsUnauthenticated(Publish(*first, *sequence, Count(32)).status()));
}

TEST_F(Matches, UnderATokenPolicyTheWholeListIsWaitedForOrNothing) {
  const auto first = world_.OpenSession();
  const auto second = world_.OpenSession();
  const Ask compute = {.will_compute = true, .policy = "h2o", .keeps_every_token = false};
  const Ask wait = {.wait = seconds(5), .policy = "h2o", .keeps_every_token = false};
  Match(*first, Count(96), compute);
  EXPECT_FALSE(Match(*second, Count(64), wait).waits());
  EXPECT_TRUE(Match(*second, Count(97), wait).waits());
}

// Lists that share prefixes of any length, compared with a comparison of all ids.
TEST(ComputationsTest, LongestIsWhatComparingTheIdsSays) {
  TestRandom random;
  const Ids head = [&] {
    Ids ids(300);
    for (std::uint32_t& id : ids) id = static_cast<std::uint32_t>(random.Below(3));
    return ids;
  }();
  const auto some = [&] {
    Ids ids(head.begin(), head.begin() + static_cast<std::ptrdiff_t>(random.Below(300)));
    for (std::uint64_t more = random.Below(2) * random.Below(100) + ids.empty(); more > 0; --more) {
      ids.push_back(static_cast<std::uint32_t>(random.Below(3)));
    }
    return ids;
  };
  for (int round = 0; round < 300; ++round) {
    const bool every_boundary = random.Below(2) == 0;
    Computations computations;
    std::vector<Ids> said;
    for (std::uint64_t i = random.Below(6); i > 0; --i) {
      said.push_back(some());
      bool dropped = false;
      computations.Add({.id = ComputationId(said.size()),
                        .session = SessionId(said.size()),
                        .asker = "another",
                        .chain = {.start = "one", .every_boundary = every_boundary},
                        .tokens = std::make_shared<TokenList>(said.back())},
                       dropped);
    }
    const TokenList asked(some());
    for (const std::uint64_t limit :
         {std::uint64_t{asked.ids.size()}, random.Below(asked.ids.size() + 1)}) {
      std::uint64_t expected = 0;
      for (const Ids& ids : said) {
        std::uint64_t common = 0;
        while (common < std::min<std::uint64_t>(limit, ids.size()) &&
               ids[common] == asked.ids[common]) {
          ++common;
        }
        const std::uint64_t rest = every_boundary ? common % kPrefixBlock : common;
        expected = std::max(expected, common == ids.size() ? common : common - rest);
      }
      const PrefixChain chain = {.start = "one", .every_boundary = every_boundary};
      ASSERT_EQ(computations.Longest("me", chain, asked, limit), expected) << round;
      EXPECT_EQ(computations.Longest("another", chain, asked, limit), 0u);
    }
  }
}

TEST_F(Matches, OneSessionsComputationsAreCounted) {
  const auto first = world_.OpenSession();
  const auto second = world_.OpenSession();
  Match(*first, Count(64), {.will_compute = true});
  Match(*first, Count(64), {.will_compute = true});
  EXPECT_EQ(store().figures().computations, 1u);
  const Asked waits = Match(*second, Count(64), {.wait = seconds(50)});
  for (std::uint32_t i = 1; i <= Computations::kMaxPerSession; ++i) {
    Match(*first, Count(64, 1000 * i), {.will_compute = true});
  }
  EXPECT_EQ(store().figures().computations, Computations::kMaxPerSession);
  (void)store().Sweep();
  EXPECT_FALSE(waits.waits()) << "the oldest has made room, and its waiter is told";
}

class LittleRoom : public PrefixFixture {
 protected:
  LittleRoom() : PrefixFixture(World::Options{.tenant_limit = 256 * 1024}) {}
};

TEST_F(LittleRoom, WhatCannotBeRememberedIsAnsweredAtOnce) {
  const auto first = world_.OpenSession();
  const auto second = world_.OpenSession();
  const Ids list = Count(100000);
  const Asked computing = Match(*first, list, {.will_compute = true});
  ASSERT_FALSE(computing.waits());
  EXPECT_FALSE(computing.answer().computation.valid());
  EXPECT_EQ(store().figures().computations, 0u);
  EXPECT_EQ(IndexBytes(), 0u);
  const auto rank = OpenRank(0);
  EXPECT_TRUE(absl::IsResourceExhausted(Match(*rank, list).status()));
}

// ---- Groups

TEST_F(Matches, AGroupIsToldWhatAllOfItsRanksHave) {
  const auto zero = OpenRank(0);
  const auto one = OpenRank(1);
  PublishNew(*zero, Count(100));
  EXPECT_EQ(Match(*zero, Count(200)).answer().tokens, 0u) << "the other rank has nothing";
  EXPECT_EQ(Match(*one, Count(200)).answer().tokens, 0u);
  const PrefixId other = PublishNew(*one, Count(70));
  const Asked first = Match(*one, Count(200));
  EXPECT_EQ(first.answer().tokens, 64u);
  EXPECT_EQ(first.answer().prefix, other);
  const Asked second = Match(*zero, Count(200));
  EXPECT_EQ(second.answer().tokens, 64u);
  EXPECT_NE(second.answer().prefix, other) << "each forks its own";
  // Not for ranks of a group of another size, or without a group.
  EXPECT_EQ(Match(*OpenRank(0, 3, "h"), Count(200)).answer().tokens, 0u);
  EXPECT_EQ(Match(*world_.OpenSession(), Count(200)).answer().tokens, 0u);
  // A later group of the same size finds them.
  EXPECT_EQ(Match(*OpenRank(0, 2, "h"), Count(200)).answer().tokens, 64u);
}

TEST_F(Matches, AnEndThatNotAllRanksHaveIsNone) {
  const auto zero = OpenRank(0);
  const auto one = OpenRank(1);
  const Ask ask = {.policy = "h2o", .keeps_every_token = false};
  const Head head = {.policy = "h2o", .keeps_every_token = false};
  PublishNew(*zero, Count(100), head);
  PublishNew(*zero, Count(50), head);
  PublishNew(*one, Count(70), head);
  PublishNew(*one, Count(50), head);
  EXPECT_EQ(Match(*zero, Count(200), ask).answer().tokens, 50u);
  EXPECT_EQ(Match(*one, Count(200), ask).answer().tokens, 50u);
}

TEST_F(Matches, EveryRankGetsTheSameAnswerWhateverHappensInBetween) {
  {
    const auto zero = OpenRank(0);
    const auto one = OpenRank(1);
    PublishNew(*zero, Count(64));
    const PrefixId ones = PublishNew(*one, Count(64));
    EXPECT_EQ(Match(*zero, Count(200)).answer().tokens, 64u);
    // Longer prefixes are published, and the answer's prefix is freed. Rank 1 still gets the answer
    // of rank 0.
    PublishNew(*zero, Count(128));
    PublishNew(*one, Count(128));
    while (DropLeastRecentlyUsed().has_value()) {
    }
    ASSERT_TRUE(store().Free(ones));
    const Asked second = Match(*one, Count(200));
    EXPECT_EQ(second.answer().tokens, 64u);
    EXPECT_EQ(second.answer().prefix, ones);
    const auto fork = Fork(*one, ones, 64);
    ASSERT_TRUE(fork.ok()) << fork.status();
    EXPECT_EQ(Differs(**fork, Count(64)), "");
    // Only rank 1 has asked again; rank 0 gets the same answer when it asks.
    EXPECT_EQ(Match(*one, Count(200)).answer().tokens, 0u);
    PublishNew(*one, Count(128));
    PublishNew(*zero, Count(128));
    EXPECT_EQ(Match(*zero, Count(200)).answer().tokens, 0u);
    EXPECT_EQ(Match(*zero, Count(200)).answer().tokens, 128u);
    EXPECT_EQ(Match(*one, Count(200)).answer().tokens, 128u);
  }
}

TEST_F(Matches, WhatWasToldIsForgottenAfterAWhileOrWithItsRanks) {
  const auto zero = OpenRank(0);
  const auto one = OpenRank(1);
  EXPECT_EQ(Match(*zero, Count(64)).answer().tokens, 0u);
  PublishNew(*zero, Count(64));
  PublishNew(*one, Count(64));
  Pass(PrefixStore::kAgreed);
  EXPECT_EQ(Match(*one, Count(64)).answer().tokens, 64u) << "the other asked too long ago";
  tenant().EndSession(one->id());
  const auto again = OpenRank(1);
  ASSERT_TRUE(store().Free(Match(*again, Count(64)).answer().prefix));
  EXPECT_EQ(Match(*zero, Count(64)).answer().tokens, 64u) << "as told to the new rank 1";
  EXPECT_EQ(Match(*zero, Count(64)).answer().tokens, 0u);
}

TEST_F(Matches, AGroupWaitsTogether) {
  const auto a0 = OpenRank(0, 2, "a");
  const auto a1 = OpenRank(1, 2, "a");
  const auto b0 = OpenRank(0, 2, "b");
  const auto b1 = OpenRank(1, 2, "b");
  const Ask ask = {.wait = seconds(10), .will_compute = true};
  EXPECT_FALSE(Match(*a0, Count(64), ask).waits());
  EXPECT_FALSE(Match(*a1, Count(64), ask).waits()) << "its own group's is nobody else's";
  const Asked zero = Match(*b0, Count(64), ask);
  const Asked one = Match(*b1, Count(64), ask);
  EXPECT_TRUE(zero.waits());
  EXPECT_TRUE(one.waits());
  PublishNew(*a0, Count(64));
  EXPECT_TRUE(zero.waits()) << "rank 1 has nothing yet";
  PublishNew(*a1, Count(64));
  ASSERT_FALSE(zero.waits());
  ASSERT_FALSE(one.waits());
  EXPECT_EQ(zero.answer().tokens, 64u);
  EXPECT_EQ(one.answer().tokens, 64u);
  // One rank's timeout ends the wait of all.
  Match(*a0, Count(64, 500), ask);
  Match(*a1, Count(64, 500), ask);
  const Asked patient = Match(*b0, Count(64, 500), ask);
  const Asked hasty = Match(*b1, Count(64, 500), {.wait = seconds(1)});
  Pass(seconds(1));
  ASSERT_FALSE(hasty.waits());
  ASSERT_FALSE(patient.waits());
  EXPECT_EQ(patient.answer().tokens, 0u);
  // A rank that dies ends the waits of the others.
  const Asked left = Match(*b0, Count(64, 500), {.wait = seconds(10)});
  ASSERT_TRUE(left.waits());
  tenant().EndSession(b1->id());
  ASSERT_FALSE(left.waits());
  EXPECT_TRUE(absl::IsAborted(left.status())) << left.status();
}

}  // namespace
}  // namespace tessera::cache
