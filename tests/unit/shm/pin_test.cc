#include "proto/shm/pin.h"

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::shm {
namespace {

TEST(Pin, WordsOfEpochsAreNeitherFreeNorRevoked) {
  TestRandom random;
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t epoch = random.Below(std::uint64_t{1} << 62);
    const std::uint64_t word = PinWord(epoch);
    ASSERT_EQ(PinnedEpoch(word), epoch);
    ASSERT_NE(word, kPinFree);
    ASSERT_NE(word, kPinRevoked);
  }
}

TEST(Pin, UnpinFreesTheSlotAndSaysThatItHeld) {
  Word epoch{7}, slot{kPinFree};
  const std::uint64_t word = Pin(slot, epoch);
  EXPECT_EQ(PinnedEpoch(word), 7u);
  EXPECT_EQ(slot.load(), word);
  epoch.fetch_add(1);  // retiring does not revoke a pin
  EXPECT_TRUE(Unpin(slot, word));
  EXPECT_EQ(slot.load(), kPinFree);
}

TEST(Pin, ARevokedPinFailsOnceAndTheSlotIsUsableAgain) {
  Word epoch{7}, slot{kPinFree};
  const std::uint64_t word = Pin(slot, epoch);
  EXPECT_TRUE(Revoke(slot, word));
  EXPECT_EQ(slot.load(), kPinRevoked);
  EXPECT_FALSE(Revoke(slot, word));
  EXPECT_FALSE(Unpin(slot, word));
  EXPECT_EQ(slot.load(), kPinFree);
  const std::uint64_t again = Pin(slot, epoch);
  EXPECT_TRUE(Unpin(slot, again));
}

TEST(Pin, OnlyTheExactPinIsRevoked) {
  Word epoch{7}, slot{kPinFree};
  const std::uint64_t old = Pin(slot, epoch);
  EXPECT_TRUE(Unpin(slot, old));
  epoch.fetch_add(1);
  const std::uint64_t fresh = Pin(slot, epoch);
  EXPECT_FALSE(Revoke(slot, old));
  EXPECT_TRUE(Unpin(slot, fresh));
  EXPECT_FALSE(Revoke(slot, fresh));
  EXPECT_EQ(slot.load(), kPinFree);
}

}  // namespace
}  // namespace tessera::shm
