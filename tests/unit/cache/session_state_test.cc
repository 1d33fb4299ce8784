#include "daemon/cache/tenant/session_state.h"

#include <cstring>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

class SessionStateTest : public testing::Test {
 protected:
  std::shared_ptr<SessionState> Make(std::uint64_t staging_bytes = kTestStaging) {
    absl::StatusOr<std::shared_ptr<SessionState>> session =
        SessionState::Create({.id = SessionId(3),
                              .secret = 111,
                              .nonce = 222,
                              .staging_bytes = staging_bytes,
                              .tail_extent_bytes = kTestTailExtent,
                              .device = &device_,
                              .node = &node_,
                              .tenant = &tenant_,
                              .heap = &heap_});
    EXPECT_TRUE(session.ok()) << session.status();
    return *session;
  }
  device::CpuDevice device_{kernels::BestImplementation()};
  pool::Account node_{"node", 2 * kTestStaging};
  pool::Account tenant_{"tenant", 2 * kTestStaging};
  pool::Account heap_{"heap", 1 << 20};
};

TEST_F(SessionStateTest, TheNonceOpensOnce) {
  const auto session = Make();
  EXPECT_FALSE(session->mapped());
  EXPECT_FALSE(session->TakeNonce(221));
  EXPECT_FALSE(session->TakeNonce(0));
  EXPECT_FALSE(session->mapped());
  EXPECT_TRUE(session->TakeNonce(222));
  EXPECT_TRUE(session->mapped());
  EXPECT_FALSE(session->TakeNonce(222));
}

TEST_F(SessionStateTest, ASessionIsChargedWhileItLives) {
  const auto first = Make();
  const std::uint64_t one = heap_.used_bytes(pool::MemoryTag::kState);
  EXPECT_GE(one, std::uint64_t{58} << 10);  // what a session was measured to need
  auto second = Make();
  EXPECT_EQ(heap_.used_bytes(), 2 * one);
  second.reset();
  EXPECT_EQ(heap_.used_bytes(), one);
  pool::Account full("heap", one - 1);
  const auto refused = SessionState::Create({.id = SessionId(4),
                                             .tail_extent_bytes = kTestTailExtent,
                                             .device = &device_,
                                             .node = &node_,
                                             .tenant = &tenant_,
                                             .heap = &full});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
}

TEST_F(SessionStateTest, StagingIsCreatedOnceAndGoesWithTheSession) {
  auto session = Make();
  EXPECT_EQ(session->StagingRange(0, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(node_.used_bytes(), 0u);
  EXPECT_EQ(session->staging(), nullptr);
  ASSERT_TRUE(session->CreateStaging().ok());
  const Staging* staging = session->staging();
  ASSERT_TRUE(session->CreateStaging().ok());
  EXPECT_EQ(session->staging(), staging);
  EXPECT_EQ(node_.used_bytes(pool::MemoryTag::kStaging), kTestStaging);
  EXPECT_EQ(tenant_.used_bytes(pool::MemoryTag::kStaging), kTestStaging);

  absl::StatusOr<AddressRange> worker =
      AddressRange::Map(staging->memory().Share()->fd.get(), kTestStaging, Access::kReadWrite);
  ASSERT_TRUE(worker.ok());
  worker->data()[kTestStaging - 1] = std::byte{42};
  EXPECT_EQ((*session->StagingRange(kTestStaging - 1, 1))[0], std::byte{42});
  session.reset();
  EXPECT_EQ(node_.used_bytes() + tenant_.used_bytes(), 0u);
}

TEST_F(SessionStateTest, RangesOutsideOfStagingAreRefusedWithAllThreeNumbers) {
  const auto session = Make();
  ASSERT_TRUE(session->CreateStaging().ok());
  TestRandom random;
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t offset = random.OneIn(2) ? random.Border() : random.Below(kTestStaging + 2);
    const std::uint64_t bytes = random.OneIn(2) ? random.Border() : random.Below(kTestStaging + 2);
    const bool fits = offset <= kTestStaging && bytes <= kTestStaging - offset;
    ASSERT_EQ(session->StagingRange(offset, bytes).ok(), fits) << offset << " + " << bytes;
  }
  const absl::Status refused = session->StagingRange(65000, 1000).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kOutOfRange);
  for (const char* part : {"65000", "1000", "65536"}) {
    EXPECT_NE(refused.ToString().find(part), std::string::npos) << refused;
  }
}

TEST_F(SessionStateTest, StagingThatDoesNotFitTheAccountsIsRefusedAndNothingIsLeft) {
  const auto session = Make(3 * kTestStaging);
  EXPECT_EQ(session->CreateStaging().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(node_.used_bytes() + tenant_.used_bytes(), 0u);
  absl::StatusOr<pool::Charge> others =
      node_.Reserve(pool::MemoryTag::kPoolExtents, kTestStaging + 1);
  ASSERT_TRUE(others.ok());
  const auto second = Make();
  EXPECT_EQ(second->CreateStaging().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(tenant_.used_bytes(), 0u);
  others->Reset();
  EXPECT_TRUE(second->CreateStaging().ok());  // a retry succeeds
}

TEST_F(SessionStateTest, AHostileCountOfWaitsRaisesAFigureAndNoMore) {
  const auto session = Make();
  TenantCounters counters;
  const auto added = [&] {
    const std::uint64_t before = counters.tail_full_waits.load();
    session->CountSteps(counters);
    return counters.tail_full_waits.load() - before;
  };
  shm::Word& waits = session->control()->page().ring_full_waits;
  EXPECT_EQ(added(), 0u);
  waits.store(5);
  EXPECT_EQ(added(), 5u);
  waits.store(2);  // a decrease counts as nothing
  EXPECT_EQ(added(), 0u);
  waits.store(3);
  EXPECT_EQ(added(), 1u);
  // The worker owns the word: an absurd value raises the counter by no more than a worker could
  // have waited.
  session->control()->page().ring_full_waits.store(~std::uint64_t{0});
  EXPECT_EQ(added(), std::uint64_t{1} << 20);
}

TEST_F(SessionStateTest, StepsAreCountedByTheirWait) {
  const auto session = Make();
  shm::ControlPage& page = session->control()->page();
  TenantCounters counters;
  page.step_waits[0].store(7);
  page.step_waits[2].store(1);
  page.step_wait_nanoseconds.store(900'000);
  session->CountSteps(counters);
  EXPECT_EQ(counters.step_waits.count(), 8u);
  session->CountSteps(counters);
  EXPECT_EQ(counters.step_waits.count(), 8u);
  // A count wraps around; one that goes back is a fault of the worker and adds nothing.
  page.step_waits[0].store(~std::uint32_t{0});
  session->CountSteps(counters);
  EXPECT_EQ(counters.step_waits.count(), 8u);
  page.step_waits[0].store(4);
  session->CountSteps(counters);
  EXPECT_EQ(counters.step_waits.count(), 8u + 5u);
}

TEST_F(SessionStateTest, AFreshControlPageIsEmptyAndAsksForAWake) {
  const auto session = Make();
  const shm::ControlPage& page = session->control()->page();
  EXPECT_EQ(page.magic, shm::kControlMagic);
  EXPECT_EQ(page.protocol_version, shm::kProtocolVersion);
  EXPECT_EQ(page.layout_fingerprint, shm::kLayoutFingerprint);
  EXPECT_EQ(page.wake.load(), 1u);
  for (const shm::ReaderSlot& slot : page.readers) EXPECT_EQ(slot.word.load(), shm::kPinFree);
  for (const shm::Word& word : page.commits) EXPECT_EQ(word.load(), 0u);
  session->control()->CancelWake();
  EXPECT_EQ(page.wake.load(), 0u);
  session->control()->RequestWake();
  EXPECT_EQ(page.wake.load(), 1u);
}

}  // namespace
}  // namespace tessera::cache
