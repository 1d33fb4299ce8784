// The order of background work: layer by layer as rows arrive, and always the same.

#include <cstring>

#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

// The first layers' jobs run while later layers' rows are still arriving.
TEST_F(CompactorTest, OneLayerIsEncodedWhileTheNextIsAppended) {
  constexpr std::uint32_t kLayers = 3;
  model_ = world_.Register(cache::SmallModel("layers", kLayers, 2));
  Track track = NewTrack(SmallMosaic());
  const Stamps stamps = DrawTokens(200, 1);
  const auto packed = [&](std::uint32_t layer) {
    const cache::SequenceView view = View(track);
    return view.lanes[model_->layout().lane(layer, 0)].resolved.segments == 1 &&
           FormsOf(track, layer) == Forms{"16 kept: 200"};
  };
  std::uint64_t least = 0;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    ASSERT_TRUE(
        track.sequence->Append({layer, 1, 0, stamps.size()}, DrawnRows(model_->layout(), stamps))
            .ok());
    compactor_.Appended(
        track.sequence,
        {.first_layer = layer, .layers = 1, .end_of_prompt = true, .until = stamps.size()});
    EXPECT_EQ(scheduler_.Queued(), (Forms{kSeal, kSeal})) << "this layer's, at once";
    // One of its lanes is done and the other waits while the next layer's rows arrive.
    ASSERT_TRUE(scheduler_.RunFirst(kSeal));
    if (layer + 1 < kLayers) {
      EXPECT_EQ(track.sequence->OpenEntries(model_->layout().lane(layer + 1, 0)), 0u);
    }
    ASSERT_TRUE(scheduler_.RunFirst(kSeal));
    EXPECT_TRUE(packed(layer)) << layer;
    Collect();
    // The pool never held all rows in dense form at once.
    const std::uint64_t used = Used(pool::MemoryTag::kTiles);
    if (layer == 0) least = used;
    EXPECT_EQ(used, least * (layer + 1)) << "no layer before it is held plain";
  }
  track.stamps = stamps;
  EXPECT_EQ(Shown(track), "");
}

// The bytes that lanes show, except the unused rows of partial dense tiles, which are undefined.
std::vector<std::byte> BytesOf(const cache::SequenceView& view) {
  std::vector<std::byte> bytes;
  const auto add = [&](const void* data, std::size_t size) {
    const auto* first = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), first, first + size);
  };
  for (const kernels::SegmentView& segment : view.segments) {
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    add(&segment.entries, sizeof segment.entries);
    const std::uint32_t full = segment.entries / kernels::kTileEntries;
    const bool rest = segment.shape.packed() && segment.entries % kernels::kTileEntries != 0;
    for (std::uint32_t t = 0; t < full + (rest ? 1 : 0); ++t) {
      add(segment.arena + segment.tile_offsets[t], layout.bytes);
      if (layout.summary_bytes == 0) continue;
      add(segment.arena + segment.summary_offsets[t], layout.summary_bytes);
    }
  }
  return bytes;
}

// The same history gives the same jobs in the same order, and the same bytes.
TEST_F(CompactorTest, TheSameStoryTwiceIsTheSame) {
  struct Told {
    Forms jobs;
    std::vector<std::byte> bytes;
  };
  const Stamps prompt = DrawTokens(300, 1);
  const Stamps alike = DrawTokens(100, 1);
  const Stamps others = DrawTokens(120, 2);
  const auto tell = [&] {
    Told told;
    Track one = NewTrack(SmallMosaic());
    Track two = NewTrack(Quest());
    const auto run = [&] {
      while (const std::optional<std::string> job = scheduler_.RunNext()) told.jobs.push_back(*job);
      Collect();
      for (const Track* track : {&one, &two}) {
        const std::vector<std::byte> bytes = BytesOf(View(*track));
        told.bytes.insert(told.bytes.end(), bytes.begin(), bytes.end());
      }
    };
    AppendStamps(one, prompt, true);
    AppendStamps(two, prompt, true);
    run();
    DecodeStamps(one, alike);
    DecodeStamps(two, others);
    run();
    DecodeStamps(one, others);
    run();
    for (const Track* track : {&one, &two}) {
      EXPECT_TRUE(world_.tenant().FreeSequence(track->sequence->id()).ok());
    }
    return told;
  };
  const Told first = tell();
  EXPECT_GT(first.jobs.size(), 6u);
  EXPECT_FALSE(first.bytes.empty());
  const Told second = tell();
  EXPECT_EQ(first.jobs, second.jobs);
  EXPECT_TRUE(first.bytes == second.bytes);
}

// These tokens are in no tail, so no wake announces full tiles.
TEST_F(CompactorTest, WhatIsDecodedThroughCallsTakesTheSameForm) {
  for (const policies::Policy& policy : {SmallMosaic(), Quest()}) {
    Track mapped = NewTrack(policy);
    Track called = NewTrack(policy);
    for (Track* track : {&mapped, &called}) Append(*track, 96, 1, /*end_of_prompt=*/true);
    RunAll();
    const Stamps stamps = DrawTokens(70, 1);
    DecodeStamps(mapped, stamps);
    DecodeByCalls(called, stamps);
    RunAll();
    Forms forms = FormsOf(mapped);
    if (policy.mosaic.has_value()) {
      forms.push_back("plain: 6");
    } else {
      forms = {"summed up: 160", "plain: 6"};
    }
    EXPECT_EQ(FormsOf(called), forms);
    EXPECT_EQ(Shown(called), "");
  }
}

}  // namespace
}  // namespace tessera::compaction
