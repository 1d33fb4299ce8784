// Published prefixes under memory pressure: which of them move to the host tier, which give way,
// and that what is used, pinned or the only copy stays.

#include <string>
#include <vector>

#include "daemon/residency/demote_prefixes.h"
#include "daemon/residency/drop_prefixes.h"
#include "daemon/residency/tier_room.h"
#include "tests/unit/residency/pressure_fixture.h"

namespace tessera::residency {
namespace {

using cache::Prefix;
using cache::PrefixStore;
using cache::Sequence;
using testing::HasSubstr;

constexpr std::uint64_t kAll = ~std::uint64_t{0};

class PrefixesTest : public PressureTest {
 protected:
  void BuildWith(std::uint64_t tier, std::size_t tenants = 1) {
    Build(std::vector<Limits>(tenants), tier);
    demote_.emplace(&node_->host_tier());
    offload_.emplace(OffloadIdle::Options{.clock = &clock_, .node = node_.get(), .idle = kIdle});
  }
  void TearDown() override {
    // Prefixes outlive their sessions.
    for (std::size_t i = 0; i < models_.size(); ++i) {
      for (const PrefixStore::Description& held : tenant(i).prefixes().List()) {
        EXPECT_TRUE(tenant(i).prefixes().Free(held.prefix->id()));
      }
    }
    PressureTest::TearDown();
  }
  // Publishes a sequence under ids of its own, one second after the last one.
  PrefixId Publish(Sequence& sequence, std::size_t i = 0, bool pinned = false) {
    PrefixStore& store = tenant(i).prefixes();
    const cache::PrefixScope scope = cache::ScopeOf("t", *models_[i], "dense", true);
    const auto chain = store.ChainOf(sessions_[i]->id(), scope);
    auto frozen = tenant(i).ForkForPrefix(sequence);
    EXPECT_TRUE(chain.ok() && frozen.ok()) << frozen.status();
    const std::vector<std::uint32_t> ids(kTokens, ++published_);
    const auto published = store.Publish({.session = sessions_[i]->id(),
                                          .chain = *chain,
                                          .policy = "dense",
                                          .ids = ids,
                                          .life = {.pinned = pinned},
                                          .frozen = *std::move(frozen)});
    EXPECT_TRUE(published.ok()) << published.status();
    clock_.Advance(std::chrono::seconds(1));
    return published->prefix->id();
  }
  PrefixId PublishNew(std::size_t i = 0, bool pinned = false) {
    std::shared_ptr<Sequence> sequence;
    EXPECT_TRUE(Add(i, &sequence).ok());
    const PrefixId id = Publish(*sequence, i, pinned);
    EXPECT_TRUE(tenant(i).FreeSequence(sequence->id()).ok());
    return id;
  }
  // For each prefix: x in the pool, - in the tier, . gone.
  std::string Places(const std::vector<PrefixId>& ids, std::size_t i = 0) {
    std::string text;
    for (const PrefixId id : ids) {
      char place = '.';
      for (const PrefixStore::Description& held : tenant(i).prefixes().List()) {
        if (held.prefix->id() == id) place = held.prefix->sequence().offloaded() ? '-' : 'x';
      }
      text += place;
    }
    return text;
  }
  absl::StatusOr<std::shared_ptr<Sequence>> Fork(PrefixId id) {
    const auto from = tenant(0).prefixes().TakeForFork(id, sessions_[0]->id());
    if (!from.ok()) return from.status();
    const absl::StatusOr<cache::Residence> resident = from->prefix->sequence().Restore();
    if (!resident.ok()) return resident.status();
    return tenant(0).ForkPrefix(*sessions_[0], *from);
  }
  // Pool bytes of one sequence.
  std::uint64_t BytesOfOne() {
    std::shared_ptr<Sequence> one;
    EXPECT_TRUE(Add(0, &one).ok());
    const std::uint64_t bytes = one->Describe(/*lanes=*/false).tile_bytes;
    EXPECT_TRUE(tenant(0).FreeSequence(one->id()).ok());
    return bytes;
  }

  std::optional<DemotePrefixes> demote_;
  std::optional<OffloadIdle> offload_;
  std::uint32_t published_ = 0;
};

TEST_F(PrefixesTest, TheLeastRecentlyUsedMovesAndComesBack) {
  BuildWith(64 * kMiB);
  const std::vector<PrefixId> ids = {PublishNew(), PublishNew(), PublishNew()};
  { ASSERT_TRUE(tenant(0).FreeSequence((*Fork(ids[0]))->id()).ok()); }  // used now
  Relief relief = demote_->RelievePressure(tenant(0), {.bytes = 1});
  EXPECT_EQ(relief.steps, 1u);
  EXPECT_GT(relief.bytes, 0u);
  EXPECT_EQ(Places(ids), "x-x");
  relief = demote_->RelievePressure(tenant(0), {.bytes = kAll});
  EXPECT_EQ(relief.steps, 2u);
  EXPECT_THAT(relief.hindrance, HasSubstr("no published prefix in the pool is unused"));
  EXPECT_EQ(Places(ids), "---");
  const auto fork = Fork(ids[1]);
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_EQ((*fork)->Describe(/*lanes=*/false).tokens, kTokens);
  EXPECT_EQ(Places(ids), "-x-");
}

TEST_F(PrefixesTest, WhatIsUsedOrPinnedStays) {
  BuildWith(64 * kMiB);
  const std::vector<PrefixId> ids = {PublishNew(), PublishNew(0, /*pinned=*/true), PublishNew()};
  const auto fork = Fork(ids[0]);
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(demote_->RelievePressure(tenant(0), {.bytes = kAll}).steps, 1u);
  EXPECT_EQ(Places(ids), "xx-");
  DropPrefixes drop({&*demote_, &*offload_});
  EXPECT_EQ(drop.RelievePressure(tenant(0), {.bytes = kAll}).steps, 0u);
  EXPECT_EQ(Places(ids), "xx-");
}

TEST_F(PrefixesTest, InAFullTierTheOldestGiveWay) {
  BuildWith(5 * kMiB / 2);  // room for two
  std::vector<PrefixId> ids;
  for (int i = 0; i < 5; ++i) ids.push_back(PublishNew());
  EXPECT_EQ(demote_->RelievePressure(tenant(0), {.bytes = 3 * BytesOfOne() - 1}).steps, 3u);
  EXPECT_EQ(Places(ids), ".--xx");
  EXPECT_EQ(demote_->RelievePressure(tenant(0), {.bytes = kAll}).steps, 2u);
  EXPECT_EQ(Places(ids), "...--");
  // Not for a prefix that was used less recently than they, which is dropped instead.
  ASSERT_TRUE(tenant(0).FreeSequence((*Fork(ids[3]))->id()).ok());  // back in the pool
  const PrefixId newest = PublishNew();
  ASSERT_TRUE(tenant(0).FreeSequence((*Fork(ids[4]))->id()).ok());
  demote_->RelievePressure(tenant(0), {.bytes = kAll});
  EXPECT_EQ(Places({ids[3], newest, ids[4]}), ".--");
}

// Prefixes in the tier are not sacrificed for what could never fit.
TEST_F(PrefixesTest, WhatIsTooLargeForTheTierEvictsNothing) {
  BuildWith(5 * kMiB / 2);
  const std::vector<PrefixId> ids = {PublishNew(), PublishNew()};
  demote_->RelievePressure(tenant(0), {.bytes = kAll});
  std::shared_ptr<Sequence> large;
  ASSERT_TRUE(Add(0, &large, 4 * kTokens).ok());
  clock_.Advance(2 * kIdle);
  EXPECT_EQ(offload_->RelievePressure(tenant(0), {.bytes = kAll}).bytes, 0u);
  EXPECT_EQ(Places(ids), "--");
}

TEST_F(PrefixesTest, SequencesComeBeforePrefixes) {
  BuildWith(5 * kMiB / 2);
  const std::vector<PrefixId> ids = {PublishNew(), PublishNew()};
  demote_->RelievePressure(tenant(0), {.bytes = kAll});
  const auto sequences = Fill(0, 3);
  clock_.Advance(2 * kIdle);
  const Relief relief = offload_->RelievePressure(tenant(0), {.bytes = kAll});
  EXPECT_EQ(relief.steps, 2u);
  EXPECT_THAT(relief.hindrance, HasSubstr("the host tier is full"));
  EXPECT_EQ(Places(ids), "..");
  EXPECT_EQ(Gone(sequences), "--x");
}

// The tier is shared: one tenant's prefixes do not keep another's sequences out of it.
TEST_F(PrefixesTest, PrefixesOfOthersMakeRoomForSequences) {
  BuildWith(5 * kMiB / 2, /*tenants=*/2);
  for (int i = 0; i < 2; ++i) tenant(i).SetLimits({.host_tier_bytes = 5 * kMiB / 2});
  const std::vector<PrefixId> ids = {PublishNew(1), PublishNew(1)};
  demote_->RelievePressure(tenant(1), {.bytes = kAll});
  EXPECT_EQ(Places(ids, 1), "--");
  std::shared_ptr<Sequence> sequence;
  ASSERT_TRUE(Add(0, &sequence).ok());
  const auto went = OffloadSequence(*node_, tenant(0), *sequence);
  ASSERT_TRUE(went.ok()) << went.status();
  EXPECT_GT(*went, 0u);
  EXPECT_EQ(Places(ids, 1), ".-");
}

TEST_F(PrefixesTest, WithoutATierTheyAreDropped) {
  BuildWith(0);
  const std::vector<PrefixId> ids = {PublishNew(), PublishNew(), PublishNew()};
  EXPECT_THAT(demote_->RelievePressure(tenant(0), {.bytes = 1}).hindrance, HasSubstr("disabled"));
  DropPrefixes drop({&*demote_, &*offload_});
  EXPECT_EQ(drop.RelievePressure(tenant(0), {.bytes = 1}).steps, 1u);
  EXPECT_EQ(Places(ids), ".xx");
  EXPECT_THAT(drop.RelievePressure(tenant(0), {.bytes = kAll}).hindrance, HasSubstr("all unused"));
  EXPECT_EQ(Places(ids), "...");
}

// A prefix and its publisher keep each other's segments in the pool. Once the prefix is gone, the
// idle sequence moves.
TEST_F(PrefixesTest, WhatAnIdleSequenceSharesIsFreedByDroppingThePrefix) {
  BuildWith(64 * kMiB);
  const auto sequences = Fill(0, 3);
  std::vector<PrefixId> ids;
  for (const auto& sequence : sequences) ids.push_back(Publish(*sequence));
  clock_.Advance(2 * kIdle);
  EXPECT_EQ(demote_->RelievePressure(tenant(0), {.bytes = 1}).bytes, 0u);
  EXPECT_EQ(offload_->RelievePressure(tenant(0), {.bytes = 1}).bytes, 0u);
  EXPECT_EQ(Places(ids), "xxx") << "dropping them is the last resort";
  DropPrefixes drop({&*demote_, &*offload_});
  EXPECT_GT(drop.RelievePressure(tenant(0), {.bytes = 1}).bytes, 0u);
  EXPECT_EQ(Places(ids), ".xx");
  EXPECT_EQ(Gone(sequences), "-xx");
  const Relief relief = drop.RelievePressure(tenant(0), {.bytes = kAll});
  EXPECT_EQ(Places(ids), "...");
  EXPECT_EQ(Gone(sequences), "---");
  EXPECT_GT(relief.bytes, 0u);
}

}  // namespace
}  // namespace tessera::residency
