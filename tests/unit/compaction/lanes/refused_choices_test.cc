// A prompt whose share is smaller than the policy's window: the caller gets an error, the prompt
// stays whole until more tokens arrive, and it delays nothing else.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/compaction/jobs/managed_sequence.h"
#include "daemon/policies/grammar/parse.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr char kPackedLate[] = "+mosaickv:sinks=0,recent=0,min_segment=64,segment=256,select=0";

class RefusedChoices : public CompactorTest {
 protected:
  RefusedChoices() : CompactorTest(4 << 20, 96 << 20) {
    model_ = world_.Register(cache::SmallModel("refused", 4, 2));
  }
  static policies::Policy Policy(const std::string& text) {
    absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
    EXPECT_TRUE(policy.ok()) << policy.status();
    return *std::move(policy);
  }
  // Uses the keys of the newest tokens as their queries.
  void Show(const Track& track) {
    const policies::Policy policy = Compactor::PolicyOf(*track.sequence);
    const std::uint64_t tokens = track.stamps.size();
    const std::uint64_t count =
        std::min<std::uint64_t>(policies::NeedsOf(policy).last_queries, tokens);
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      if (policies::DecidesFor(policy, layer) != layer) continue;
      const kernels::LayerGeometry geometry = model_->geometry(layer);
      const kernels::DenseTile tile = model_->layout().tile(layer);
      std::vector<std::byte> rows(count * geometry.query_heads * tile.row_bytes());
      for (std::uint64_t i = 0; i < count * geometry.query_heads; ++i) {
        const auto head = static_cast<std::uint32_t>(i % geometry.query_heads);
        DrawRow(track.stamps[tokens - count + i / geometry.query_heads],
                {layer, head / geometry.group(), cache::RowKind::kKey}, tile,
                rows.data() + i * tile.row_bytes());
      }
      ObservedLayer shown = {.layer = layer, .tokens = tokens};
      shown.last = {tokens - count, count, rows.data()};
      const absl::Status status = compactor_.Observe(*track.sequence, shown);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void Prompt(Track& track, std::uint64_t tokens) {
    Append(track, tokens, 1);
    Show(track);
  }
  absl::Status CompressNow(const Track& track) {
    const auto told = Compress(track);
    RunAll();
    EXPECT_EQ(told->times, 1);
    return told->status;
  }
  void ExpectRefused(const Track& track) {
    const absl::Status status = CompressNow(track);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("layer 0: "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("less than window"));
  }
  void DecodeSome(Track& track, int tokens) {
    for (int i = 0; i < tokens; i += 32) {
      Decode(track, 32, 1);
      RunAll();
    }
  }
  std::vector<std::uint64_t> Entries(const Track& track) {
    std::vector<std::uint64_t> entries;
    for (const auto& lane : track.sequence->Describe(cache::Sequence::Detail::kLanes).lanes) {
      entries.push_back(lane.entries);
    }
    return entries;
  }
  std::uint64_t PackedEntries(const Track& track) {
    std::uint64_t entries = 0;
    for (const cache::SegmentRun& run : track.sequence->Form()) {
      if (run.shape.packed()) entries += run.entries;
    }
    return entries / model_->lanes();
  }
  std::uint64_t ShownBytes(const Track& track) {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < model_->layers(); ++i) {
      ManagedSequence::ManagedLayer& layer = ManagedSequence::Of(*track.sequence)->layer(i);
      MutexLock lock(layer.mutex);
      bytes += layer.state.observation.bytes();
    }
    return bytes;
  }
};

// A fifth of 100 tokens is 20, and the window is 32: two prompts together are enough.
TEST_F(RefusedChoices, WhatWaitsIsDecidedAboutWithWhatComes) {
  for (const std::string system :
       {"snapkv", "chunkkv", "chunkkv:reuse=2", "chunkkv:reuse=4", "pyramidkv:beta=1"}) {
    for (const char* packed : {"", kPackedLate, "+quest:dense_layers=0"}) {
      SCOPED_TRACE(system + packed);
      Track track = NewTrack(Policy(system + packed));
      Prompt(track, 100);
      for (int again = 0; again < 2; ++again) {
        ExpectRefused(track);
        EXPECT_THAT(Entries(track), Each(100u));
        EXPECT_EQ(PackedEntries(track), 0u);
        EXPECT_EQ(Compactor::DecidedOf(*track.sequence), 0u);
      }
      Prompt(track, 100);
      const absl::Status status = CompressNow(track);
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_THAT(Entries(track), Each(40u));
      EXPECT_EQ(Compactor::DecidedOf(*track.sequence), 200u);
      ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    }
  }
}

TEST_F(RefusedChoices, AnotherBudgetIsForWhatWaits) {
  for (const std::string packed : {"", kPackedLate}) {
    Track track = NewTrack(Policy("snapkv" + packed));
    Prompt(track, 100);
    ExpectRefused(track);
    ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy("snapkv:budget=0.32" + packed)).ok());
    const absl::Status status = CompressNow(track);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_THAT(Entries(track), Each(32u));
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

TEST_F(RefusedChoices, WhatIsDecodedBehindItIsPacked) {
  for (const std::string system : {"snapkv", "chunkkv", "chunkkv:reuse=2"}) {
    for (const bool asked : {false, true}) {
      SCOPED_TRACE(system);
      Track track = NewTrack(Policy(system + kPackedLate));
      Append(track, 100, 1, /*end_of_prompt=*/true);
      RunAll();
      if (asked) ExpectRefused(track);
      DecodeSome(track, 1628);
      EXPECT_THAT(Entries(track), Each(1728u));
      EXPECT_GE(PackedEntries(track), 1600u);
      ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    }
  }
}

TEST_F(RefusedChoices, IsLoggedWhereNobodyAsked) {
  Track track = NewTrack(Policy("snapkv"));
  const int before = LinesWith("tokens not chosen");
  Append(track, 100, 1, /*end_of_prompt=*/true);
  RunAll();
  EXPECT_EQ(LinesWith("tokens not chosen"), before + 1);
}

// The policy needs the queries of the newest tokens, some of which may be truncated.
TEST_F(RefusedChoices, OldQueriesAreForgotten) {
  for (const std::string policy : {"snapkv:budget=0.001", "chunkkv:budget=0.001",
                                   "pyramidkv:budget=0.001", "snapkv:budget=0.001+think"}) {
    SCOPED_TRACE(policy);
    Track track = NewTrack(Policy(policy));
    Prompt(track, 100);
    ExpectRefused(track);
    const std::uint64_t first = ShownBytes(track);
    for (int i = 0; i < 30; ++i) {
      Prompt(track, 40);
      ExpectRefused(track);
    }
    EXPECT_LE(ShownBytes(track), 3 * first);
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
  }
}

}  // namespace
}  // namespace tessera::compaction
