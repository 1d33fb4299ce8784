// Layers that adopt the choice of another one (`reuse`) keep the same tokens, whatever happens in
// between.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

class Reuse : public CompactorTest {
 protected:
  Reuse() : CompactorTest(0, 96 << 20) {
    model_ = world_.Register(cache::SmallModel("reuse", 4, 2, kernels::ElementType::kFp32));
  }
  Track NewReusing() {
    return NewTrack(*policies::ParsePolicy("chunkkv:tokens=40,window=8,chunk=4,reuse=2"));
  }
  void ShowNewest(Track& track) {
    constexpr std::uint64_t kCount = 8;
    for (std::uint32_t layer = 0; layer < model_->layers(); layer += 2) {
      std::vector<float> rows(kCount * model_->geometry(layer).query_heads * 64);
      for (float& element : rows) element = static_cast<float>(random_.Below(1000)) / 1000 - 0.5f;
      ObservedLayer shown = {.layer = layer, .tokens = track.stamps.size()};
      shown.last = {track.stamps.size() - kCount, kCount,
                    reinterpret_cast<std::byte*>(rows.data())};
      const absl::Status status = compactor_.Observe(*track.sequence, shown);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  absl::Status CompressLayers(Track& track, std::uint32_t first, std::uint32_t layers) {
    const auto told = std::make_shared<absl::Status>(absl::UnknownError("never told"));
    compactor_.Compress(track.sequence, {.first_layer = first, .layers = layers, .all_shown = true},
                        [told](absl::Status status) { *told = std::move(status); });
    RunAll();
    return *told;
  }
  absl::Status CompressAll(Track& track) { return CompressLayers(track, 0, model_->layers()); }
  // Compares layers 0 and 1, and 2 and 3, head by head.
  void ExpectPairsAlike(const Track& track, std::uint64_t entries) {
    const auto lanes = track.sequence->Describe(cache::Sequence::Detail::kEntries).lanes;
    for (const std::size_t lane : {0, 1, 4, 5}) {
      EXPECT_EQ(lanes[lane].entries, entries) << lane;
      EXPECT_EQ(lanes[lane].positions, lanes[lane + 2].positions) << lane;
    }
  }
  void AddPrompt(Track& track, std::uint64_t tokens) {
    Append(track, tokens, 1);
    ShowNewest(track);
  }
};

TEST_F(Reuse, AForkBetweenTheLayersHasTheChoice) {
  Track track = NewReusing();
  AddPrompt(track, 100);
  ASSERT_TRUE(CompressLayers(track, 0, 1).ok());
  Track child = Fork(track);
  // The child inherits the observations of layer 2.
  for (Track* each : {&track, &child}) {
    const absl::Status status = CompressAll(*each);
    EXPECT_TRUE(status.ok()) << status;
    ExpectPairsAlike(*each, 40);
    AddPrompt(*each, 60);
    EXPECT_TRUE(CompressAll(*each).ok());
    ExpectPairsAlike(*each, 80);
  }
}

TEST_F(Reuse, ACutBetweenTheLayersKeepsThemAlike) {
  Track track = NewReusing();
  AddPrompt(track, 100);
  ASSERT_TRUE(CompressLayers(track, 0, 1).ok());
  ASSERT_TRUE(CompressLayers(track, 2, 1).ok());
  Truncate(track, 99);
  const absl::Status status = CompressAll(track);
  EXPECT_TRUE(status.ok()) << status;
  ExpectPairsAlike(track, 39);
  AddPrompt(track, 60);
  EXPECT_TRUE(CompressAll(track).ok());
  ExpectPairsAlike(track, 79);
}

TEST_F(Reuse, TokensThatComeBetweenTheLayersWait) {
  Track track = NewReusing();
  AddPrompt(track, 100);
  ASSERT_TRUE(CompressLayers(track, 0, 1).ok());
  ASSERT_TRUE(CompressLayers(track, 2, 1).ok());
  Append(track, 60, 1);
  for (const std::uint32_t layer : {1u, 3u}) {
    const absl::Status status = CompressLayers(track, layer, 1);
    EXPECT_TRUE(status.ok()) << status;
  }
  ExpectPairsAlike(track, 100);
  ShowNewest(track);
  EXPECT_TRUE(CompressAll(track).ok());
  ExpectPairsAlike(track, 80);
}

TEST_F(Reuse, ALayerIsNotCompressedBeforeTheOneThatItFollows) {
  Track track = NewReusing();
  AddPrompt(track, 100);
  const absl::Status early = CompressLayers(track, 1, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(early)) << early;
  ASSERT_TRUE(CompressAll(track).ok());
  ExpectPairsAlike(track, 40);
}

// Wherever memory runs out, later work brings the layers into agreement.
TEST_F(Reuse, MemoryThatRunsOutBetweenTheLayersDelaysTheSecond) {
  int between = 0;
  for (std::uint64_t room = 4096; room < 600'000; room += 4096) {
    SCOPED_TRACE(room);
    Track track = NewReusing();
    AddPrompt(track, 200);
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    const std::uint64_t free = account.limit_bytes() - account.used_bytes();
    auto squeezed = *account.Reserve(pool::MemoryTag::kPoolExtents, free - room);
    // Delays the freeing of evicted rows.
    std::optional<cache::Tenant::Reader> reader(world_.tenant());
    const absl::Status status = CompressAll(track);
    reader.reset();
    Collect();
    squeezed.Reset();
    const auto lanes = track.sequence->Describe(true).lanes;
    between += lanes[1].entries != lanes[2].entries;
    Track child = Fork(track);
    for (Track* each : {&track, &child}) {
      AddPrompt(*each, 60);
      const absl::Status next = CompressAll(*each);
      EXPECT_TRUE(next.ok()) << next;
      const auto now = each->sequence->Describe(cache::Sequence::Detail::kEntries).lanes;
      for (const std::size_t lane : {0, 1, 4, 5}) {
        EXPECT_EQ(now[lane].positions, now[lane + 2].positions) << lane;
      }
      each->sequence->Free();
    }
    Collect();
    if (status.ok()) break;
  }
  EXPECT_GT(between, 0);
}

}  // namespace
}  // namespace tessera::compaction
