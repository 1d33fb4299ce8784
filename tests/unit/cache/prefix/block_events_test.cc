// What routers hear of a tenant's prefixes: the property is that each worker's events always add up
// to what that worker finds.

#include "daemon/cache/prefix/block_events.h"

#include <gmock/gmock.h>

#include <map>
#include <set>
#include <string>

#include "tests/fakes/seed.h"
#include "tests/unit/cache/prefix/prefix_fixture.h"

namespace tessera::cache {
namespace {

using testing::IsEmpty;
using testing::UnorderedElementsAre;

// Adds events up, as a router does.
class Router final : public BlockEventSink {
 public:
  void Changed(const BlockReader& reader, const std::string& model,
               const std::vector<BlockEvent>& events) override {
    ASSERT_TRUE(workers.contains(reader.worker)) << "it has not come";
    EXPECT_EQ(reader.tenant, "tenant-1");
    EXPECT_EQ(model, "m");
    auto& blocks = workers[reader.worker];
    for (const BlockEvent& event : events) {
      if (!event.stored) {
        EXPECT_EQ(blocks.erase(event.hash), 1u);
        continue;
      }
      Ids path;
      if (event.parent.has_value()) {
        ASSERT_TRUE(blocks.contains(*event.parent)) << "its parent comes first";
        path = blocks[*event.parent];
      }
      path.insert(path.end(), event.ids.begin(), event.ids.end());
      EXPECT_TRUE(blocks.emplace(event.hash, path).second) << "it was told already";
    }
  }
  void Cleared(const BlockReader& reader) override { workers[reader.worker].clear(); }
  void Left(const BlockReader& reader) override { EXPECT_EQ(workers.erase(reader.worker), 1u); }

  std::set<Ids> PathsOf(const std::string& worker) const {
    std::set<Ids> paths;
    const auto found = workers.find(worker);
    if (found == workers.end()) return paths;
    for (const auto& [hash, path] : found->second) paths.insert(path);
    return paths;
  }

  std::map<std::string, std::map<std::uint64_t, Ids>> workers;  // token ids up to each block
};

// A base class, because the world is made before the members.
struct WithRouter {
  Router router_;
};

class BlockEvents : protected WithRouter, public PrefixFixture {
 protected:
  BlockEvents() : PrefixFixture({.max_prefixes = 6, .blocks = &router_}) {}

  std::shared_ptr<SessionState> Open(const std::string& worker, std::uint32_t rank = 0,
                                     std::uint32_t size = 1) {
    auto session = tenant().OpenSession(
        {.worker_name = worker, .group = "g", .rank = rank, .group_size = size});
    EXPECT_TRUE(session.ok()) << session.status();
    return *session;
  }
  // From the list of all prefixes, whose ids `ids_` has.
  std::set<Ids> Expected(std::uint32_t rank, std::uint32_t size) {
    std::set<Ids> paths;
    for (const PrefixStore::Description& published : store().List()) {
      const Prefix::Options& prefix = published.prefix->options();
      if (prefix.rank != rank || prefix.group_size != size || !prefix.chain.every_boundary)
        continue;
      const Ids& ids = ids_.at(published.prefix->id());
      for (std::size_t end = 32; end <= ids.size(); end += 32) {
        paths.emplace(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(end));
      }
    }
    return paths;
  }

  std::map<PrefixId, Ids> ids_;
};

TEST_F(BlockEvents, TellWhatEachWorkerFinds) {
  const auto giver = Open("a");
  EXPECT_THAT(router_.PathsOf("a"), IsEmpty());
  const PrefixId id = PublishNew(*giver, Count(70));
  EXPECT_THAT(router_.PathsOf("a"), UnorderedElementsAre(Count(32), Count(64)));
  const auto later = Open("b");
  EXPECT_EQ(router_.PathsOf("b"), router_.PathsOf("a"));
  const auto rank = Open("c", 1, 2);
  EXPECT_THAT(router_.PathsOf("c"), IsEmpty()) << "another rank does not find it";
  const auto nameless = Open("");
  EXPECT_EQ(router_.workers.size(), 3u);
  // A token policy's prefix matches at its end alone: nobody hears of it.
  PublishNew(*giver, Count(64, 500), {.policy = "h2o", .keeps_every_token = false});
  EXPECT_EQ(router_.PathsOf("a").size(), 2u);
  tenant().EndSession(giver->id());
  EXPECT_FALSE(router_.workers.contains("a"));
  EXPECT_TRUE(store().Free(id));
  EXPECT_THAT(router_.PathsOf("b"), IsEmpty());
}

TEST_F(BlockEvents, SessionsOfOneNameAreOneWorker) {
  const auto first = Open("a");
  const auto second = Open("a");
  PublishNew(*first, Count(32));  // the router checks that it is told once
  tenant().EndSession(first->id());
  EXPECT_EQ(router_.PathsOf("a").size(), 1u);
  tenant().EndSession(second->id());
  EXPECT_THAT(router_.workers, IsEmpty());
}

TEST_F(BlockEvents, AddUpAfterAnything) {
  TestRandom random;
  struct Known {
    std::shared_ptr<SessionState> session;
    std::string worker;
    std::uint32_t rank;
    std::uint32_t size;
  };
  std::vector<Known> sessions;
  for (int step = 0; step < 400; ++step) {
    const std::uint64_t what = random.Below(10);
    if (what < 2 && sessions.size() < 6) {
      const std::uint32_t size = random.OneIn(2) ? 1 : 2;
      const auto rank = static_cast<std::uint32_t>(random.Below(size));
      // A name is of one rank.
      const std::string worker = std::string("w") + std::to_string(random.Below(2)) + "-" +
                                 std::to_string(rank) + "-" + std::to_string(size);
      sessions.push_back({Open(worker, rank, size), worker, rank, size});
    } else if (what == 2 && !sessions.empty()) {
      const std::size_t at = random.Below(sessions.size());
      tenant().EndSession(sessions[at].session->id());
      sessions.erase(sessions.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (what < 7 && !sessions.empty()) {
      const Known& by = random.Pick(sessions);
      const bool keeps = !random.OneIn(4);
      const Ids ids = Count(static_cast<std::uint32_t>(random.Between(1, 130)),
                            static_cast<std::uint32_t>(random.Below(2)));
      const PrefixId id = PublishNew(
          *by.session, ids,
          {.life = {.ttl = random.OneIn(3) ? std::chrono::seconds(5) : Clock::Duration::zero()},
           .policy = keeps ? "dense" : "h2o",
           .keeps_every_token = keeps});
      ids_[id] = ids;
    } else if (what == 7) {
      const auto all = store().List();
      if (!all.empty()) {
        EXPECT_TRUE(store().Free(all[random.Below(all.size())].prefix->id()));
      }
    } else if (what == 8) {
      Pass(std::chrono::seconds(random.Below(4)));
    } else if (!sessions.empty()) {
      store().Retell(random.Pick(sessions).worker);
    }
    std::set<std::string> here;
    for (const Known& known : sessions) {
      ASSERT_EQ(router_.PathsOf(known.worker), Expected(known.rank, known.size)) << step;
      here.insert(known.worker);
    }
    ASSERT_EQ(router_.workers.size(), here.size()) << step;
  }
}

}  // namespace
}  // namespace tessera::cache
