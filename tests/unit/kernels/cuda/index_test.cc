// The index arithmetic of the CUDA kernels, compared with simple loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <vector>

#include "kernels/cuda/common/fragment.h"
#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/host/step_writer.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels::cuda {
namespace {

class Index : public ::testing::Test {
 protected:
  Index() : seed_(TestSeed()), random_(seed_) {}
  std::uint64_t Pick(std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random_);
  }
  std::uint64_t seed_;
  std::mt19937_64 random_;
};

bool IsVisible(std::uint64_t position, std::uint64_t query, VisibleRule rule) {
  if (rule.causal && position > query) return false;
  return rule.window == 0 || position + rule.window > query;
}

TEST_F(Index, VisibleEntriesAreThoseThatTheRuleLetsThrough) {
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t base = Pick(0, 200);
    const EntryRange live = {.begin = static_cast<std::uint32_t>(Pick(0, 40)),
                             .end = static_cast<std::uint32_t>(Pick(40, 100))};
    const VisibleRule rule = {.causal = Pick(0, 1) == 0,
                              .window = static_cast<std::uint32_t>(Pick(0, 1) * Pick(1, 150))};
    const std::uint64_t first = Pick(0, 300);
    const auto queries = static_cast<std::uint32_t>(Pick(1, 5));
    const EntryRange all = VisibleEntries(base, live, VisibleFromAll(first, queries, rule));
    for (std::uint32_t e = 0; e < 110; ++e) {
      bool any = false;
      for (std::uint32_t q = 0; q < queries; ++q) {
        const bool seen = e >= live.begin && e < live.end && IsVisible(base + e, first + q, rule);
        any |= seen;
        // The kernel cuts each query's range out of the union of all ranges.
        ASSERT_EQ(VisibleEntries(base, all, VisibleFrom(first + q, rule)).Contains(e), seen)
            << "seed " << seed_ << " entry " << e << " query " << q;
      }
      ASSERT_EQ(all.Contains(e), any) << "seed " << seed_ << " entry " << e;
    }
  }
}

TEST_F(Index, VisibleRangesStandTheLargestPositions) {
  const std::uint64_t far = std::uint64_t{1} << 62;
  const EntryRange live = {.begin = 0, .end = 512};
  EXPECT_TRUE(VisibleEntries(far, live, VisibleFrom(5, {.causal = true})).empty());
  EXPECT_TRUE(VisibleEntries(5, live, VisibleFrom(far, {.causal = true, .window = 1000})).empty());
  EXPECT_EQ(VisibleEntries(far, live, VisibleFrom(far + 9, {.causal = true})).end, 10u);
  EXPECT_EQ(VisibleEntries(far, live, VisibleFrom(0, {.causal = false})).end, 512u);
}

TEST_F(Index, RingSlotsFollowATokenWrittenOneByOne) {
  const auto ring_tiles = static_cast<std::uint32_t>(Pick(1, 9));
  std::uint32_t slot = 0;
  for (std::uint64_t token = 0; token < 2000; ++token) {
    ASSERT_EQ(RingSlot(token, ring_tiles), slot);
    if (token % kTileEntries == kTileEntries - 1) slot = slot + 1 == ring_tiles ? 0 : slot + 1;
  }
  EXPECT_TRUE(RingHolds(7, 7 + ring_tiles * 32, ring_tiles));
  EXPECT_FALSE(RingHolds(7, 8 + ring_tiles * 32, ring_tiles));
  EXPECT_FALSE(RingHolds(8, 7, ring_tiles));
}

TEST_F(Index, ResolveObjectFindsWhatLiesInOneExtentAndNothingElse) {
  const std::uint64_t extent_bytes = 1024;
  const std::array<std::uint64_t, 4> bases = {0, 0x70000, 0x10000, 0};
  const DeviceArena arena = {.extent_bases = reinterpret_cast<std::uint64_t>(bases.data()),
                             .extent_bytes = extent_bytes,
                             .extents = 3};
  for (int round = 0; round < 5000; ++round) {
    const std::uint64_t offset = Pick(0, 5 * extent_bytes);
    const std::uint64_t bytes = Pick(1, 1100);
    const std::uint64_t place = offset / extent_bytes;
    const bool whole = (offset + bytes - 1) / extent_bytes == place;
    const std::uint64_t expected = offset % 64 == 0 && whole && place < 3 && bases[place] != 0
                                       ? bases[place] + offset % extent_bytes
                                       : 0;
    ASSERT_EQ(ResolveObject(arena, offset, bytes, 64), expected);
  }
  EXPECT_EQ(ResolveObject(arena, ~std::uint64_t{63}, 64, 64), 0u);
  EXPECT_EQ(ResolveObject(arena, 1024, ~std::uint64_t{0}, 64), 0u);
  EXPECT_EQ(ResolveObject({}, 0, 1, 1), 0u);
}

TEST_F(Index, AWarpFindsTheLaneOfEveryWorkItem) {
  for (const std::uint32_t lanes : {1u, 2u, 31u, 32u, 33u, 200u, 1025u}) {
    std::vector<std::uint32_t> works = {0};
    std::vector<std::uint32_t> owner;
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      const auto parts = static_cast<std::uint32_t>(Pick(0, 3) == 0 ? 0 : Pick(1, 4));
      owner.insert(owner.end(), parts, lane);
      works.push_back(static_cast<std::uint32_t>(owner.size()));
    }
    const std::size_t stride = owner.size() / 50 + 1;
    for (std::uint32_t work = 0; work < owner.size(); work += stride) {
      ASSERT_EQ(tests::EmulateFindLane(works.data(), lanes, work), owner[work])
          << "seed " << seed_ << " lanes " << lanes << " work " << work;
    }
  }
}

// Writes one lane and lists (position, tile of a table or ring slot, row) for every entry.
TEST_F(Index, PartsCoverEveryEntryOnce) {
  for (int round = 0; round < 100; ++round) {
    std::vector<SegmentSpec> segments(Pick(0, 6));
    std::uint64_t position = Pick(0, 1000);
    const std::uint64_t extent_bytes = 1 << 20;
    std::uint64_t table = 0;
    struct Place {
      std::uint64_t position, word_or_slot;
      std::uint32_t row;
      auto operator<=>(const Place&) const = default;
    };
    std::vector<Place> expected;
    for (SegmentSpec& segment : segments) {
      segment = {.tile_table = table,
                 .first_position = position,
                 .entries = static_cast<std::uint32_t>(Pick(0, 4) == 0 ? 0 : Pick(1, 2000))};
      for (std::uint32_t e = 0; e < segment.entries; ++e) {
        expected.push_back({position + e, table + e / 32 * 8, e % 32});
      }
      position += segment.entries;
      table += 64 * 8;
    }
    const auto ring_tiles = static_cast<std::uint32_t>(Pick(1, 20));
    const std::uint64_t end = position + Pick(0, ring_tiles * 32);
    for (std::uint64_t t = position; t < end; ++t) {
      expected.push_back({t, t / 32 % ring_tiles, static_cast<std::uint32_t>(t % 32)});
    }

    const StepShape shape = {.batch = 1,
                             .layers = 1,
                             .lanes = 1,
                             .segments = static_cast<std::uint32_t>(segments.size()),
                             .extents = 1};
    std::vector<std::uint64_t> image(StepBytes(shape) / 8 + 2);
    auto* base = reinterpret_cast<std::byte*>(image.data());
    base += reinterpret_cast<std::uintptr_t>(base) % 16;
    StepWriter writer({base, StepBytes(shape)}, shape);
    const std::uint64_t extent = 0x100000;
    writer.SetExtents({&extent, 1}, extent_bytes);
    writer.SetSequence(0, {.committed = end, .first_query_position = end + 5, .queries = 1});
    writer.BeginLayer(1, ElementType::kBf16);
    writer.AddLane(segments, {.ring = 0x40, .ring_tiles = ring_tiles, .begin = position});
    ASSERT_EQ(writer.Finish(), StepStatus::kOk);

    const StepReader step(base);
    std::vector<Place> found;
    ASSERT_EQ(step.works(0)[1], PartsOf(step.lane(0, 0)));
    for (std::uint32_t part = 0; part < step.works(0)[1]; ++part) {
      const PartRef ref = LocatePart(step, 0, step.lane(0, 0), step.sequence(0), part, {});
      ASSERT_TRUE(ref.sound);
      ASSERT_TRUE(ref.tail || ref.entries.end <= kSplitEntries);
      for (std::uint32_t e = ref.entries.begin; e < ref.entries.end; ++e) {
        const std::uint64_t where =
            ref.tail ? (ref.ring_slot + e / 32) % ref.ring_tiles : ref.tile_table + e / 32 * 8;
        found.push_back({ref.base_position + e, where, e % 32});
      }
    }
    ASSERT_EQ(found, expected) << "seed " << seed_;
  }
}

TEST_F(Index, EightRowsOfAChunkLieInDifferentBanks) {
  for (const std::uint32_t row_bytes : {128u, 256u, 512u, 1024u}) {
    for (std::uint32_t chunk = 0; chunk < row_bytes / 16; ++chunk) {
      for (std::uint32_t first = 0; first < 32; first += 8) {
        std::set<std::uint32_t> groups;  // of four banks
        for (std::uint32_t row = first; row < first + 8; ++row) {
          groups.insert(SwizzledOffset(row, chunk, row_bytes) % 128 / 16);
        }
        ASSERT_EQ(groups.size(), 8u);
      }
    }
    std::set<std::uint32_t> places;
    for (std::uint32_t row = 0; row < 32; ++row) {
      for (std::uint32_t chunk = 0; chunk < row_bytes / 16; ++chunk) {
        places.insert(SwizzledOffset(row, chunk, row_bytes));
      }
    }
    EXPECT_EQ(places.size(), 2 * row_bytes);
    EXPECT_EQ(*places.rbegin(), 32 * row_bytes - 16);
  }
}

TEST_F(Index, AccumulatorStoresLieInDifferentBanks) {
  constexpr std::uint32_t kRow = MmaShape<128, 1>::kOutputRow;
  for (std::uint32_t i = 0; i < 4; ++i) {
    std::set<std::uint32_t> banks;
    for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
      banks.insert((AccumulatorColumn(lane, i) * kRow + AccumulatorRow(lane, i)) % 32);
    }
    EXPECT_EQ(banks.size(), 32u);
  }
}

TEST_F(Index, FragmentsCoverTheirTilesOnce) {
  std::set<std::pair<std::uint32_t, std::uint32_t>> accumulator, operand_b, keys, values;
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    for (std::uint32_t i = 0; i < 4; ++i) {
      accumulator.insert({AccumulatorRow(lane, i), AccumulatorColumn(lane, i)});
    }
    for (std::uint32_t i = 0; i < 2; ++i) {
      operand_b.insert({OperandBRow(lane, i), OperandBColumn(lane)});
      operand_b.insert({OperandBRow(lane, i) + 1, OperandBColumn(lane)});
    }
    keys.insert({KeyMatrixEntry(lane), KeyMatrixChunk(lane)});
    values.insert({ValueMatrixEntry(lane), ValueMatrixChunk(lane)});
  }
  EXPECT_EQ(accumulator.size(), 128u);
  EXPECT_EQ(operand_b.size(), 128u);
  EXPECT_EQ(keys.size(), 32u);
  EXPECT_EQ(values.size(), 32u);
}

TEST_F(Index, FaultWordsKeepTheirFieldsAndOrderByLayerThenLane) {
  const std::uint64_t word = FaultWord::Pack(FaultKind::kBadTail, 61, 70000);
  EXPECT_EQ(FaultWord::Kind(word), FaultKind::kBadTail);
  EXPECT_EQ(FaultWord::Layer(word), 61u);
  EXPECT_EQ(FaultWord::Lane(word), 70000u);
  EXPECT_LT(FaultWord::Pack(FaultKind::kBadStep, 1, 9), FaultWord::Pack(FaultKind::kBadTile, 2, 0));
  EXPECT_LT(FaultWord::Pack(FaultKind::kBadStep, 1, 8), FaultWord::Pack(FaultKind::kBadTile, 1, 9));
  const std::uint64_t row = UnusableWord::Pack(1000000, 127, true);
  EXPECT_EQ(UnusableWord::Run(row), 1000000u);
  EXPECT_EQ(UnusableWord::Row(row), 127u);
  EXPECT_TRUE(UnusableWord::IsValue(row));
  EXPECT_LT(UnusableWord::Pack(3, 31, false), UnusableWord::Pack(3, 0, true));
  EXPECT_LT(UnusableWord::Pack(3, 31, true), UnusableWord::Pack(4, 0, false));
}

}  // namespace
}  // namespace tessera::kernels::cuda
