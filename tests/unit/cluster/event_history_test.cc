#include "daemon/cluster/events/event_history.h"

#include <gmock/gmock.h>

#include <deque>
#include <map>
#include <string>

#include "tests/fakes/seed.h"

namespace tessera::cluster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pointee;

EventHistory::Payload Bytes(std::size_t count, char of = 'x') {
  return std::make_shared<const std::string>(count, of);
}

TEST(EventHistory, NumbersEachTopicFromZero) {
  EventHistory history;
  EXPECT_FALSE(history.Has("a"));
  EXPECT_EQ(history.Add("a", Bytes(1)), 0u);
  EXPECT_EQ(history.Add("a", Bytes(1)), 1u);
  EXPECT_EQ(history.OnlyTopic(), "a");
  EXPECT_EQ(history.Add("b", Bytes(1)), 0u);
  EXPECT_EQ(history.OnlyTopic(), std::nullopt);
  history.Forget("a");
  EXPECT_FALSE(history.Has("a"));
  EXPECT_EQ(history.Add("a", Bytes(1)), 0u) << "as if the daemon had restarted";
}

TEST(EventHistory, RepeatsWhatItHas) {
  EventHistory history(/*most_bytes=*/10);
  for (const char of : {'a', 'b', 'c', 'd'}) history.Add("t", Bytes(4, of));
  const EventHistory::Replay all = history.From("t", 0);
  EXPECT_EQ(all.first, 2u) << "older ones are gone";
  EXPECT_THAT(all.payloads,
              ElementsAre(Pointee(std::string("cccc")), Pointee(std::string("dddd"))));
  EXPECT_EQ(history.From("t", 3).first, 3u);
  EXPECT_THAT(history.From("t", 3).payloads, ElementsAre(Pointee(std::string("dddd"))));
  EXPECT_EQ(history.From("t", 4).first, 4u);
  EXPECT_THAT(history.From("t", 4).payloads, IsEmpty());
  EXPECT_THAT(history.From("none", 0).payloads, IsEmpty());
  history.Add("t", Bytes(100));
  EXPECT_EQ(history.From("t", 0).payloads.size(), 1u) << "the newest stays, whatever its size";
}

// An oracle that keeps everything, and forgets the oldest of all while there is too much.
TEST(EventHistory, KeepsTheNewestOfAllTopics) {
  TestRandom random;
  constexpr std::size_t kMost = 50;
  EventHistory history(kMost);
  std::map<std::string, std::uint64_t> next;
  std::deque<std::pair<std::string, std::pair<std::uint64_t, EventHistory::Payload>>> kept;
  std::size_t bytes = 0;
  for (int step = 0; step < 2000; ++step) {
    const std::string topic(1, static_cast<char>('a' + random.Below(4)));
    if (random.Below(20) == 0) {
      history.Forget(topic);
      next.erase(topic);
      std::erase_if(kept, [&](const auto& entry) {
        const bool is_of = entry.first == topic;
        if (is_of) bytes -= entry.second.second->size();
        return is_of;
      });
      continue;
    }
    const EventHistory::Payload payload = Bytes(1 + random.Below(20));
    ASSERT_EQ(history.Add(topic, payload), next[topic]);
    kept.push_back({topic, {next[topic]++, payload}});
    bytes += payload->size();
    while (bytes > kMost && kept.size() > 1) {
      bytes -= kept.front().second.second->size();
      kept.pop_front();
    }
    const std::uint64_t from = random.Below(static_cast<std::uint32_t>(next[topic] + 2));
    std::vector<EventHistory::Payload> expected;
    std::uint64_t first = from;
    for (const auto& [of, batch] : kept) {
      if (of != topic || batch.first < from) continue;
      if (expected.empty()) first = batch.first;
      expected.push_back(batch.second);
    }
    const EventHistory::Replay found = history.From(topic, from);
    ASSERT_EQ(found.payloads, expected);
    if (!expected.empty()) {
      ASSERT_EQ(found.first, first);
    }
  }
}

}  // namespace
}  // namespace tessera::cluster
