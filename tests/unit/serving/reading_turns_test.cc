#include "daemon/serving/attach/reading_turns.h"

#include <gtest/gtest.h>

namespace tessera::serving {
namespace {

constexpr TenantId kTenant = TenantId(1);

class ReadingTurnsTest : public testing::Test {
 protected:
  bool MayRead(const int& who, bool plenty = false, TenantId tenant = kTenant) {
    return turns_.MayRead(tenant, &who, plenty, now_);
  }
  ReadingTurns turns_;
  Clock::TimePoint now_{std::chrono::hours(1)};
  const int first_ = 1;
  const int second_ = 2;
};

TEST_F(ReadingTurnsTest, AllReadWhileThereIsPlenty) {
  EXPECT_TRUE(MayRead(first_, true));
  EXPECT_TRUE(MayRead(second_, true));
}

TEST_F(ReadingTurnsTest, OneReadsToItsEnd) {
  EXPECT_TRUE(MayRead(first_));
  EXPECT_FALSE(MayRead(second_));
  EXPECT_TRUE(MayRead(first_));
  turns_.Finished(kTenant, &second_);
  EXPECT_FALSE(MayRead(second_)) << "it was not its turn";
  turns_.Finished(kTenant, &first_);
  EXPECT_TRUE(MayRead(second_));
  EXPECT_FALSE(MayRead(first_));
}

TEST_F(ReadingTurnsTest, PlentyEndsTheTurn) {
  EXPECT_TRUE(MayRead(first_));
  EXPECT_TRUE(MayRead(second_, true));
  EXPECT_TRUE(MayRead(second_));
}

TEST_F(ReadingTurnsTest, OneThatStallsLosesItsTurn) {
  EXPECT_TRUE(MayRead(first_));
  now_ += ReadingTurns::kPatience - std::chrono::milliseconds(1);
  EXPECT_TRUE(MayRead(first_)) << "it is slow, but reads";
  now_ += ReadingTurns::kPatience - std::chrono::milliseconds(1);
  EXPECT_FALSE(MayRead(second_));
  now_ += std::chrono::milliseconds(1);
  EXPECT_TRUE(MayRead(second_));
  EXPECT_FALSE(MayRead(first_));
}

TEST_F(ReadingTurnsTest, TenantsDoNotWaitForEachOther) {
  EXPECT_TRUE(MayRead(first_));
  EXPECT_TRUE(MayRead(second_, false, TenantId(2)));
}

}  // namespace
}  // namespace tessera::serving
