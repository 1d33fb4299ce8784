// Publishes, matches, forks, drops and ends sessions at the same time. Every fork holds the
// promised rows, every wait is answered once, and nothing is left at the end.

#include <atomic>
#include <thread>

#include "tests/fakes/seed.h"
#include "tests/unit/cache/prefix/prefix_fixture.h"

namespace tessera::cache {
namespace {

class PrefixesAtOnce : public PrefixFixture {
 protected:
  PrefixesAtOnce() : PrefixFixture(World::Options{.max_prefixes = 12}) {}

  // Token lists that share prefixes: a few texts, cut anywhere.
  static Ids NewList(TestRandom& random) {
    Ids ids = Count(32, 1000 * static_cast<std::uint32_t>(random.Below(2)));
    for (std::uint64_t blocks = random.Below(3); blocks > 0; --blocks) {
      for (const std::uint32_t id : Count(32, 100 * static_cast<std::uint32_t>(random.Below(2)))) {
        ids.push_back(id);
      }
    }
    if (random.OneIn(3)) ids.resize(random.Between(1, ids.size()));
    return ids;
  }

  void Work(std::uint64_t seed, int rounds) {
    TestRandom random(seed);
    std::shared_ptr<SessionState> session = world_.OpenSession();
    for (int i = 0; i < rounds; ++i) {
      const Ids ids = NewList(random);
      switch (random.Below(6)) {
        case 0: {
          Ids all = ids;  // the sequence may be longer than the prefix
          for (const std::uint32_t id : Count(random.Below(40), 7000)) all.push_back(id);
          const auto sequence = Compute(*session, all);
          const auto published = Publish(*session, *sequence, ids,
                                         {.life = {.ttl = std::chrono::seconds(random.Below(3))}});
          // All twelve may be in use.
          if (published.ok()) {
            ASSERT_TRUE(sequence->AdoptPrefix(published->prefix->sequence()).ok());
            ASSERT_EQ(Differs(*sequence, all), "");
          } else {
            ASSERT_TRUE(absl::IsResourceExhausted(published.status())) << published.status();
          }
          ASSERT_TRUE(tenant().FreeSequence(sequence->id()).ok());
          break;
        }
        case 1:
        case 2: {
          auto answer = std::make_shared<std::optional<PrefixStore::Answer>>();
          auto told = std::make_shared<std::atomic<int>>(0);
          asked_.fetch_add(1);
          const std::uint64_t ticket =
              store().Match({.session = session->id(),
                             .scope = Scope(),
                             .ids = ids,
                             .wait = std::chrono::seconds(random.Below(2)),
                             .will_compute = random.OneIn(2)},
                            [this, answer, told](absl::StatusOr<PrefixStore::Answer> found) {
                              EXPECT_EQ(told->fetch_add(1), 0) << "told twice";
                              answered_.fetch_add(1);
                              if (found.ok()) *answer = *found;
                              told->fetch_add(10);
                            });
          if (ticket != 0) store().Cancel(ticket);
          while (told->load() < 11) std::this_thread::yield();
          if (!answer->has_value() || (*answer)->tokens == 0) break;
          // A match can be forked, whatever other threads do.
          const auto fork = Fork(*session, (*answer)->prefix, (*answer)->tokens);
          ASSERT_TRUE(fork.ok()) << fork.status();
          Ids head = ids;
          head.resize((*answer)->tokens);
          ASSERT_EQ(Differs(**fork, head), "");
          if (random.OneIn(2)) {
            ASSERT_TRUE(AppendAll(**fork, head.size(), StampsOf(Count(5, 70))).ok());
            for (const std::uint32_t id : Count(5, 70)) head.push_back(id);
            ASSERT_EQ(Differs(**fork, head), "");
          }
          if (!random.OneIn(4)) {
            ASSERT_TRUE(tenant().FreeSequence((*fork)->id()).ok());
          }
          break;
        }
        case 3:
          (void)DropLeastRecentlyUsed();
          break;
        case 4: {
          const auto list = store().List();
          if (list.empty()) break;
          (void)store().Free(list[random.Below(list.size())].prefix->id());
          break;
        }
        default:
          // About 20 seconds in all: less than a match is kept for its finder, however late the
          // finder forks it.
          world_.clock().Advance(std::chrono::milliseconds(random.Below(150)));
          (void)store().Sweep();
          if (!random.OneIn(8)) break;
          tenant().EndSession(session->id());
          session = world_.OpenSession();
      }
    }
    tenant().EndSession(session->id());
  }

  std::atomic<std::uint64_t> asked_{0};
  std::atomic<std::uint64_t> answered_{0};
};

TEST_F(PrefixesAtOnce, EveryForkIsWhatItSays) {
  TestRandom random;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this, seed = random.Bits()] { Work(seed, 400); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(answered_.load(), asked_.load());
}

// Another call may append to a sequence at any moment of its publication.
TEST_F(PrefixesAtOnce, AdoptingAPrefixDuringAnAppend) {
  {
    TestRandom random;
    const std::shared_ptr<SessionState> session = world_.OpenSession();
    for (int round = 0; round < 400; ++round) {
      const auto tokens = static_cast<std::uint32_t>(random.Between(1, 100));
      const auto head =
          random.OneIn(2) ? tokens : static_cast<std::uint32_t>(random.Between(1, tokens));
      const PrefixId id = PublishNew(*session, Count(head));
      const auto from = store().TakeForFork(id, session->id());
      ASSERT_TRUE(from.ok());
      const std::shared_ptr<Sequence> sequence = Compute(*session, Count(tokens));
      std::thread appender([&] {
        for (std::uint32_t at = tokens; at < tokens + 40; at += 5) {
          ASSERT_TRUE(AppendAll(*sequence, at, StampsOf(Count(5, at))).ok());
        }
      });
      const absl::StatusOr<Sequence::PrefixAdoption> taken =
          sequence->AdoptPrefix(from->prefix->sequence());
      EXPECT_TRUE(taken.ok() && *taken != Sequence::PrefixAdoption::kAlreadyHeld) << taken.status();
      appender.join();
      EXPECT_EQ(Differs(*sequence, Count(tokens + 40)), "");
      ASSERT_TRUE(tenant().FreeSequence(sequence->id()).ok());
      ASSERT_TRUE(store().Free(id));
    }
  }
}

}  // namespace
}  // namespace tessera::cache
