#include "daemon/cluster/events/event_queue.h"

#include <gmock/gmock.h>

#include <thread>

#include "tests/unit/cluster/blocks.h"

namespace tessera::cluster {
namespace {

using Kind = EventQueue::Note::Kind;
using cache::BlockReader;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const BlockReader kRed = {"red", "w"};
constexpr auto kNow = Clock::Duration::zero();

TEST(EventQueue, NotesComeInOrder) {
  EventQueue queue;
  queue.Cleared(kRed);
  queue.Changed(kRed, "m", {Stored(1), Stored(2, 1)});
  queue.Changed(kRed, "n", {Removed(3)});
  queue.Left(kRed);
  EXPECT_EQ(queue.figures().waiting_blocks, 3u);
  const auto notes = queue.Take(kNow);
  ASSERT_THAT(notes, SizeIs(4));
  EXPECT_EQ(notes[0].kind, Kind::kCleared);
  EXPECT_EQ(notes[1].kind, Kind::kChanged);
  EXPECT_EQ(notes[1].model, "m");
  EXPECT_THAT(notes[1].events, SizeIs(2));
  EXPECT_EQ(notes[2].model, "n");
  EXPECT_EQ(notes[3].kind, Kind::kLeft);
  EXPECT_EQ(queue.figures().waiting_blocks, 0u);
  EXPECT_THAT(queue.Take(kNow), IsEmpty());
}

TEST(EventQueue, ANameBelongsToTheFirstTenantUntilItLeaves) {
  const BlockReader blue = {"blue", "w"};
  EventQueue queue;
  queue.Changed(kRed, "m", {Stored(1)});  // before it has come
  queue.Cleared(kRed);
  queue.Cleared(blue);
  queue.Changed(blue, "m", {Stored(2)});
  queue.Left(blue);
  queue.Changed(kRed, "m", {Stored(3)});
  const auto notes = queue.Take(kNow);
  ASSERT_THAT(notes, SizeIs(2));
  EXPECT_EQ(notes[1].events[0].hash, 3u);
  queue.Left(kRed);
  queue.Cleared(blue);
  queue.Changed(blue, "m", {Stored(4)});
  EXPECT_THAT(queue.Take(kNow), SizeIs(3));
}

TEST(EventQueue, AWorkerThatLostNotesIsToldAnewAsAWhole) {
  EventQueue queue(/*most_blocks=*/2);
  const BlockReader other = {"red", "v"};
  queue.Cleared(kRed);
  queue.Cleared(other);
  queue.Changed(kRed, "m", {Stored(1), Stored(2)});
  queue.Changed(kRed, "m", {Stored(3)});
  EXPECT_EQ(queue.TakeLost(), std::nullopt) << "other notes wait";
  EXPECT_THAT(queue.Take(kNow), SizeIs(3));
  queue.Changed(kRed, "m", {Stored(4)});  // there would be room: but 3 is missing
  EXPECT_EQ(queue.figures().dropped_blocks, 2u);
  const auto lost = queue.TakeLost();
  ASSERT_TRUE(lost.has_value());
  EXPECT_EQ(lost->tenant, "red");
  EXPECT_EQ(lost->worker, "w");
  queue.Cleared(kRed);
  queue.Changed(kRed, "m", {Stored(1), Stored(2, 1), Stored(3, 2), Stored(4, 3)});
  queue.Changed(kRed, "n", {Stored(5)});
  const auto notes = queue.Take(kNow);
  ASSERT_THAT(notes, SizeIs(3));
  EXPECT_THAT(notes[1].events, SizeIs(4));
  EXPECT_EQ(queue.TakeLost(), std::nullopt);
  queue.Changed(kRed, "m", {Stored(6), Stored(7), Stored(8)});  // the limit holds again
  EXPECT_TRUE(queue.TakeLost().has_value());
}

TEST(EventQueue, OnlyWorkersThatAreHereCanBeToldAnew) {
  EventQueue queue;
  EXPECT_FALSE(queue.Lose("w"));
  queue.Cleared(kRed);
  EXPECT_TRUE(queue.Lose("w"));
  queue.Left(kRed);
  (void)queue.Take(kNow);
  EXPECT_EQ(queue.TakeLost(), std::nullopt);
}

TEST(EventQueue, WaitsForANoteOrForTheEnd) {
  EventQueue queue;
  std::thread writer([&queue] { queue.Cleared(kRed); });
  EXPECT_THAT(queue.Take(std::chrono::seconds(60)), SizeIs(1));
  writer.join();
  std::thread stopper([&queue] { queue.Stop(); });
  EXPECT_THAT(queue.Take(std::chrono::seconds(60)), IsEmpty());
  stopper.join();
}

}  // namespace
}  // namespace tessera::cluster
