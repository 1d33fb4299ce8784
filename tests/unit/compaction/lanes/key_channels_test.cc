// Keys that lose channels: which rows do, how they are stored, and that later operations keep the
// same channels.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/compaction/lanes/element.h"
#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

// Keeps 39 of 64 channels, and all channels of the newest 32 tokens.
constexpr const char* kThink = "think";

class KeyChannels : public CompactorTest {
 protected:
  static policies::Policy Policy(const std::string& text) { return *policies::ParsePolicy(text); }

  // Queries of the newest tokens of every layer, drawn anew, so that channels differ between
  // prompts.
  void ShowQueries(const Track& track, std::uint64_t count) {
    const std::uint64_t shown = std::min<std::uint64_t>(count, track.stamps.size());
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      const kernels::LayerGeometry geometry = model_->geometry(layer);
      const kernels::DenseTile tile = model_->layout().tile(layer);
      std::vector<std::byte>& rows = queries_[layer];
      rows.resize(shown * geometry.query_heads * tile.row_bytes());
      for (std::size_t i = 0; i < rows.size() / kernels::ElementBytes(tile.type); ++i) {
        SetElement(rows.data(), tile.type, static_cast<std::uint32_t>(i), Drawn(random_.Bits()));
      }
      ObservedLayer of_layer = {.layer = layer, .tokens = track.stamps.size()};
      of_layer.last = {track.stamps.size() - shown, shown, rows.data()};
      const absl::Status status = compactor_.Observe(*track.sequence, of_layer);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  absl::Status CompressAll(Track& track) {
    const auto told = Compress(track);
    RunAll();
    EXPECT_EQ(told->times, 1);
    return told->status;
  }
  Track Compressed(const std::string& policy, std::uint64_t tokens) {
    Track track = NewTrack(Policy(policy));
    Append(track, tokens, 1);
    ShowQueries(track, 32);
    EXPECT_TRUE(CompressAll(track).ok());
    EXPECT_EQ(Shown(track), "");
    return track;
  }

  // The channels that R_k of a segment selects; each of its rows is a row of the identity.
  static std::vector<std::uint32_t> ChannelsOf(const kernels::SegmentView& segment) {
    std::vector<std::uint32_t> channels;
    for (std::uint32_t c = 0; c < segment.shape.key.channels; ++c) {
      for (std::uint32_t d = 0; d < segment.shape.head_dim; ++d) {
        std::uint16_t bits;
        std::memcpy(&bits, segment.rotation.key + (c * segment.shape.head_dim + d) * sizeof bits,
                    sizeof bits);
        if (bits == 0) continue;
        EXPECT_EQ(kernels::Bf16ToFloat(bits), 1.0f);
        channels.push_back(d);
      }
    }
    EXPECT_EQ(channels.size(), segment.shape.key.channels);
    EXPECT_TRUE(std::ranges::is_sorted(channels, std::less_equal<>()));
    return channels;
  }
  // By definition, from the rows of the track's stamps.
  std::vector<std::uint32_t> BestChannels(const Track& track, std::uint32_t layer,
                                          std::uint32_t kv_head, std::uint32_t count) {
    const kernels::LayerGeometry geometry = model_->geometry(layer);
    const kernels::DenseTile tile = model_->layout().tile(layer);
    std::vector<double> keys(tile.head_dim), queries(tile.head_dim);
    std::vector<std::byte> row(tile.row_bytes());
    for (const std::uint64_t stamp : track.stamps) {
      DrawRow(stamp, {layer, kv_head, cache::RowKind::kKey}, tile, row.data());
      for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
        keys[d] += std::pow(ElementAt(row.data(), tile.type, d), 2);
      }
    }
    const std::vector<std::byte>& shown = queries_[layer];
    for (std::size_t r = 0; r * tile.row_bytes() < shown.size(); ++r) {
      if (r % geometry.query_heads / geometry.group() != kv_head) continue;
      for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
        queries[d] += std::pow(ElementAt(shown.data() + r * tile.row_bytes(), tile.type, d), 2);
      }
    }
    std::vector<std::uint32_t> order(tile.head_dim);
    std::iota(order.begin(), order.end(), 0u);
    std::ranges::stable_sort(order, [&](std::uint32_t a, std::uint32_t b) {
      return keys[a] * queries[a] > keys[b] * queries[b];
    });
    order.resize(count);
    std::ranges::sort(order);
    return order;
  }
  // Per lane, the single channel set of its packed segments.
  std::vector<std::vector<std::uint32_t>> ChannelsByLane(const Track& track) {
    const cache::SequenceView view = View(track);
    std::vector<std::vector<std::uint32_t>> by_lane;
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      std::set<std::vector<std::uint32_t>> sets;
      for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
        if (segment.shape.packed()) sets.insert(ChannelsOf(segment));
      }
      EXPECT_EQ(sets.size(), 1u);
      by_lane.push_back(sets.empty() ? std::vector<std::uint32_t>() : *sets.begin());
    }
    return by_lane;
  }

  std::map<std::uint32_t, std::vector<std::byte>> queries_;  // by layer, as last observed
};

TEST_F(KeyChannels, GoFromAllButTheNewestAndValuesStay) {
  Track track = Compressed(kThink, 200);
  EXPECT_EQ(FormsOf(track), (Forms{"39 kept: 168", "plain: 32"}));
  const cache::SequenceView view = View(track);
  for (const cache::SequenceView::LaneOf& lane : view.lanes) {
    const kernels::SegmentView& segment = view.segments[lane.first_segment];
    EXPECT_EQ(segment.shape.key, (kernels::RowShape{39, 39}));
    EXPECT_EQ(segment.shape.value, (kernels::RowShape{64, 64}));
    EXPECT_NE(segment.rotation.key, nullptr);
    EXPECT_EQ(segment.rotation.value, nullptr);
    const std::vector<std::uint32_t> channels = ChannelsOf(segment);
    EXPECT_EQ(channels, BestChannels(track, lane.layer, lane.kv_head, 39));
    // The stored rows are the originals: 39 elements of each key, all of each value.
    const kernels::TileLayout at = kernels::LayoutOf(segment.shape);
    const kernels::DenseTile dense = model_->layout().tile(lane.layer);
    std::vector<std::byte> key(dense.row_bytes()), value(dense.row_bytes());
    for (std::uint32_t e = 0; e < segment.entries; ++e) {
      const std::byte* const tile = segment.arena + segment.tile_offsets[e / 32];
      DrawRow(track.stamps[e], {lane.layer, lane.kv_head, cache::RowKind::kKey}, dense, key.data());
      DrawRow(track.stamps[e], {lane.layer, lane.kv_head, cache::RowKind::kValue}, dense,
              value.data());
      for (std::size_t i = 0; i < channels.size(); ++i) {
        ASSERT_EQ(
            ElementAt(tile + at.key_data + e % 32 * 78, dense.type, static_cast<std::uint32_t>(i)),
            ElementAt(key.data(), dense.type, channels[i]));
      }
      ASSERT_EQ(std::memcmp(tile + at.value_data + e % 32 * 128, value.data(), 128), 0);
    }
  }
}

// 39 x 2 + 64 x 2 = 206 bytes per token instead of 256, and 39 rows of 64 per lane.
TEST_F(KeyChannels, BytesAreThoseOfTheForm) {
  Track track = Compressed(kThink, 32 * 10 + 32);
  for (const auto& lane : track.sequence->Describe(cache::Sequence::Detail::kLanes).lanes) {
    ASSERT_EQ(lane.runs.size(), 2u);
    EXPECT_EQ(lane.runs[0].tile_bytes, 10u * ((32 * 206 + 63) / 64 * 64));
    EXPECT_EQ(lane.runs[0].rotation_bytes, 39u * 64 * 2);
    EXPECT_EQ(lane.runs[1].tile_bytes, 32u * 256);
  }
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), model_->lanes() * 39u * 64 * 2);
}

TEST_F(KeyChannels, WhatIsDecodedLosesTheSameWhenItIsNotAmongTheNewest) {
  Track track = Compressed(kThink, 100);
  EXPECT_EQ(FormsOf(track), (Forms{"39 kept: 68", "plain: 32"}));
  const auto channels = ChannelsByLane(track);
  std::uint64_t tokens = 100;
  for (int round = 0; round < 6; ++round) {
    const std::uint64_t more = random_.Between(1, 90);
    Decode(track, more, random_.Below(3));
    tokens += more;
    RunAll();
    EXPECT_EQ(Shown(track), "");
    EXPECT_EQ(ChannelsByLane(track), channels);
    const cache::SequenceView view = View(track);
    const cache::SequenceView::LaneOf& lane = view.lanes.front();
    const std::uint64_t in_segments = lane.resolved.tail_start;
    std::uint64_t plain = 0;
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
      if (!segment.shape.packed()) plain += segment.entries;
    }
    EXPECT_GE(plain, std::min<std::uint64_t>(in_segments, 32));
    EXPECT_LT(plain, 64u);
  }
  EXPECT_EQ(counters().strategies_made.load(), model_->lanes());
}

TEST_F(KeyChannels, ASecondPromptKeepsTheFirstOnesChannelsAndNeedsNoQueries) {
  Track track = Compressed(kThink, 100);
  const auto channels = ChannelsByLane(track);
  Append(track, 120, 2);
  EXPECT_TRUE(CompressAll(track).ok());
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(ChannelsByLane(track), channels);
  EXPECT_EQ(FormsOf(track), (Forms{"39 kept: 68", "39 kept: 120", "plain: 32"}));
  EXPECT_EQ(Used(pool::MemoryTag::kRotations), model_->lanes() * 39u * 64 * 2);  // shared
}

TEST_F(KeyChannels, AnotherRatioFindsItsOwn) {
  Track track = Compressed(kThink, 100);
  ASSERT_TRUE(compactor_.SetPolicy(*track.sequence, Policy("think:ratio=50%")).ok());
  Append(track, 100, 2);
  EXPECT_EQ(CompressAll(track).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Shown(track), "");
  ShowQueries(track, 32);
  EXPECT_TRUE(CompressAll(track).ok());
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(FormsOf(track), (Forms{"39 kept: 68", "32 kept: 100", "plain: 32"}));
}

TEST_F(KeyChannels, AShortPromptStaysWholeUnasked) {
  Track track = NewTrack(Policy(kThink));
  Append(track, 32, 1);
  EXPECT_TRUE(CompressAll(track).ok());
  EXPECT_EQ(FormsOf(track), (Forms{"plain: 32"}));
  Decode(track, 70, 1);
  RunAll();
  EXPECT_EQ(Shown(track), "");
  // The next prompt finds the channels.
  EXPECT_EQ(CompressAll(track).code(), absl::StatusCode::kFailedPrecondition);
  ShowQueries(track, 32);
  EXPECT_TRUE(CompressAll(track).ok());
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(ChannelsByLane(track).size(), model_->lanes());
}

TEST_F(KeyChannels, ForksAndCutsKeepThem) {
  Track parent = Compressed(kThink, 150);
  const auto channels = ChannelsByLane(parent);
  Track child = Fork(parent);
  ASSERT_TRUE(compactor_.Truncate(*child.sequence, 90).ok());
  child.tail.reset();
  child.stamps.resize(90);
  EXPECT_EQ(Shown(child), "");
  Decode(child, 100, 1);
  Decode(parent, 70, 2);
  RunAll();
  EXPECT_EQ(Shown(child), "");
  EXPECT_EQ(Shown(parent), "");
  EXPECT_EQ(ChannelsByLane(child), channels);
  EXPECT_EQ(ChannelsByLane(parent), channels);
}

TEST_F(KeyChannels, ValuesOfEveryTypeGoWithThem) {
  for (const char* text : {"think+bf16", "think+fp16", "think+int8", "think:recent_size=0+fp8"}) {
    Track track = Compressed(text, 130);
    EXPECT_EQ(FormsOf(track).front(),
              std::string(text).ends_with("fp8") ? "39 kept: 130" : "39 kept: 98");
    Decode(track, 70, 1);
    RunAll();
    EXPECT_EQ(Shown(track), "") << text;
  }
}

// A value beyond fp16: its rows stay as they are, and later rows are encoded again.
TEST_F(KeyChannels, WhatHasNoPlaceInTheFormStaysPlain) {
  Track track = NewTrack(Policy("think+fp16"));
  Stamps stamps = DrawTokens(100, 1);
  stamps[20] |= kHuge;
  AppendStamps(track, stamps);
  ShowQueries(track, 32);
  EXPECT_TRUE(CompressAll(track).ok());
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(counters().left_plain.load(), model_->lanes());
  Append(track, 100, 1);
  ShowQueries(track, 32);
  EXPECT_TRUE(CompressAll(track).ok());
  EXPECT_EQ(Shown(track), "");
  EXPECT_EQ(FormsOf(track), (Forms{"plain: 68", "39 kept: 100", "plain: 32"}));
}

// After a token policy: the kept tokens lose channels, except the newest.
TEST_F(KeyChannels, OfWhatATokenPolicyLeaves) {
  Track track = NewTrack(Policy("snapkv:tokens=90,window=40+think"));
  Append(track, 200, 1);
  ShowQueries(track, 40);
  EXPECT_TRUE(CompressAll(track).ok());
  const cache::SequenceView view = View(track);
  for (const cache::SequenceView::LaneOf& lane : view.lanes) {
    ASSERT_EQ(lane.resolved.segments, 2u);
    EXPECT_EQ(lane.resolved.entries, 90u);
    const kernels::SegmentView& cut = view.segments[lane.first_segment];
    EXPECT_EQ(FormOf(cut), "39 kept: 58");
    EXPECT_TRUE(cut.shape.positions);
    EXPECT_EQ(FormOf(view.segments[lane.first_segment + 1]), "plain: 32");
  }
  const auto channels = ChannelsByLane(track);
  Decode(track, 100, 1);
  RunAll();
  EXPECT_EQ(ChannelsByLane(track), channels);
}

// The newest then form a segment with gaps; the channels are those before it.
TEST_F(KeyChannels, GapsAmongTheNewestDoNotLoseThem) {
  Track track = NewTrack(Policy("snapkv:tokens=90,window=16+think"));
  Append(track, 400, 1);
  ShowQueries(track, 32);
  EXPECT_TRUE(CompressAll(track).ok());
  const auto channels = ChannelsByLane(track);
  const auto packed = [&] {
    const cache::SequenceView view = View(track);
    std::uint64_t entries = 0;
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
        entries += segment.shape.packed() ? segment.entries : 0;
      }
    }
    return entries;
  };
  EXPECT_EQ(packed(), model_->lanes() * 58u);
  Decode(track, 130, 1);
  RunAll();
  EXPECT_GE(packed(), model_->lanes() * (58u + 64u));
  EXPECT_EQ(ChannelsByLane(track), channels);
}

// The second prompt decides about both, from the observations of both.
TEST_F(KeyChannels, ShortPromptsWaitForOneAnother) {
  for (const std::string policy : {"think", "snapkv:tokens=36,window=32"}) {
    Track track = NewTrack(Policy(policy));
    for (int prompt = 0; prompt < 2; ++prompt) {
      Append(track, 20, 1);
      ShowQueries(track, 20);
      EXPECT_TRUE(CompressAll(track).ok()) << policy << ", prompt " << prompt;
    }
    if (policy == kThink) {
      EXPECT_EQ(Shown(track), "");
      EXPECT_EQ(FormsOf(track), (Forms{"39 kept: 8", "plain: 32"}));
    } else {
      for (const auto& lane : View(track).lanes) EXPECT_EQ(lane.resolved.entries, 36u);
    }
    EXPECT_EQ(Used(pool::MemoryTag::kObservations), 0u) << policy;
  }
}

TEST_F(KeyChannels, WhatWasNotShownIsToldAndHarmsNothing) {
  Track track = NewTrack(Policy(kThink));
  Append(track, 100, 1);
  const absl::Status status = CompressAll(track);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.message().find("Observe"), std::string::npos) << status;
  EXPECT_EQ(FormsOf(track), (Forms{"plain: 100"}));
  EXPECT_EQ(Shown(track), "");
}

}  // namespace
}  // namespace tessera::compaction
