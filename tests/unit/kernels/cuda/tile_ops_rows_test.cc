// Decoding, gathering and moments on a device, compared bit by bit with the scalar reference; and
// the index arithmetic of the tile operations, compared with simple loops.
#include <bit>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "kernels/cuda/encode/encode_index.h"
#include "kernels/cuda/encode/encode_summary.cuh"
#include "tests/unit/kernels/cuda/tile_ops_rig.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::GatherRow;
using kernels::kHeadDims;

constexpr ElementType kRowTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
constexpr std::uint8_t kRowGroups[] = {1, 2, 4};

TileShape RandomShape(TestRandom& random, std::uint16_t head_dim) {
  const int format = static_cast<int>(random.Between(1, 7));
  if (format <= 3) return RandomDenseShape(random, static_cast<ElementType>(format), head_dim);
  return RandomPackedShape(random, static_cast<TileFormat>(format), head_dim,
                           random.Pick(kRowGroups), true);
}

// A tile written by the reference.
EncodeCase RandomTile(TestRandom& random, const TileShape& shape) {
  const ElementType type =
      shape.packed() ? random.Pick(kRowTypes) : kernels::ElementsOf(shape.format);
  EncodeCase made(random, shape, type,
                  shape.packed() ? RotationKind::kSelection : RotationKind::kNone,
                  ElementType::kFp32, /*calm=*/true);
  std::optional<StoredBytes> stored = made.Expected();
  if (stored.has_value()) made.Take(std::move(*stored));
  return made;
}

// Bitmaps may have more bits than a row has channels: readers stop at the row's end.
void DamageBits(TestRandom& random, EncodeCase& tile) {
  const auto damage = [&](std::uint32_t begin, std::uint32_t row_bits) {
    for (std::uint32_t i = begin; i < begin + kTileEntries * row_bits; ++i) {
      tile.tile.data()[i] = static_cast<std::byte>(random.Bits());
    }
  };
  damage(tile.layout.key_bits, tile.layout.key_row.bits);
  damage(tile.layout.value_bits, tile.layout.value_row.bits);
}

TEST_F(TileOpsTest, DecodeGivesTheReferencesElements) {
  for (const std::uint32_t head_dim : kHeadDims) {
    std::vector<EncodeCase> tiles;
    std::vector<DeviceStrategy> strategies;
    std::vector<DecodeTileJob> jobs;
    for (std::uint32_t i = 0; i < 24; ++i) {
      const TileShape shape = RandomShape(random_, static_cast<std::uint16_t>(head_dim));
      tiles.push_back(RandomTile(random_, shape));
      if (random_.OneIn(4)) DamageBits(random_, tiles.back());
      strategies.push_back({.shape = shape, .layout = tiles.back().layout});
      const Bytes output(tiles.back().rows * PaddedChannels(shape) * sizeof(float));
      jobs.push_back({.tile = Put(tiles.back().tile),
                      .keys = Put(output),
                      .values = Put(output),
                      .rows = tiles.back().rows,
                      .strategy = i});
    }
    ASSERT_TRUE(calls().Decode(strategies, jobs).ok());
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      const EncodeCase& tile = tiles[i];
      const std::size_t bytes = tile.rows * PaddedChannels(tile.shape) * sizeof(float);
      Bytes keys(bytes), values(bytes), expected_keys(bytes), expected_values(bytes);
      Get(jobs[i].keys, keys);
      Get(jobs[i].values, values);
      kernels::DecodeReference({.tile = tile.tile.data(),
                                .shape = tile.shape,
                                .layout = tile.layout,
                                .rows = tile.rows,
                                .padded_channels = PaddedChannels(tile.shape),
                                .keys = reinterpret_cast<float*>(expected_keys.data()),
                                .values = reinterpret_cast<float*>(expected_values.data())});
      EXPECT_TRUE(expected_keys == keys) << Describe(tile.shape);
      EXPECT_TRUE(expected_values == values) << Describe(tile.shape);
    }
  }
}

// A new tile: the sources of its rows on the host and on the device.
struct GatherCase {
  TileShape from, to;
  std::vector<GatherRow> rows, device_rows;
  std::uint64_t tile = 0;
  std::uint64_t summaries = 0;
};

TEST_F(TileOpsTest, GatherGivesTheReferencesBytes) {
  for (const std::uint32_t head_dim : kHeadDims) {
    std::vector<EncodeCase> sources;
    sources.reserve(36);  // rows point into them
    std::vector<GatherCase> cases(12);
    std::vector<DeviceStrategy> strategies;
    std::vector<GatherTile> jobs;
    for (GatherCase& of : cases) {
      of.from = of.to = RandomShape(random_, static_cast<std::uint16_t>(head_dim));
      of.to.weights = random_.OneIn(2);
      of.to.positions = random_.OneIn(2);
      std::uint64_t addresses[3];
      for (std::uint64_t& address : addresses) {
        sources.push_back(RandomTile(random_, of.from));
        address = Put(sources.back().tile);
      }
      for (std::uint64_t r = random_.OneIn(3) ? 32 : random_.Between(1, 32); r > 0; --r) {
        const std::size_t which = random_.Below(3);
        const EncodeCase& source = sources[sources.size() - 3 + which];
        of.rows.push_back({.tile = source.tile.data(),
                           .row = static_cast<std::uint32_t>(random_.Below(source.rows)),
                           .position = static_cast<std::uint32_t>(random_.Bits())});
        of.device_rows.push_back(of.rows.back());
        of.device_rows.back().tile = reinterpret_cast<const std::byte*>(addresses[which]);
      }
      const StoredBytes room(LayoutOf(of.to));
      of.tile = Put(room.tile);
      of.summaries = Put(room.summaries);
      const auto strategy = static_cast<std::uint32_t>(strategies.size());
      strategies.push_back({.shape = of.from, .layout = LayoutOf(of.from)});
      strategies.push_back({.shape = of.to, .layout = LayoutOf(of.to)});
      jobs.push_back({.tile = of.tile,
                      .summaries = of.summaries,
                      .rows = of.device_rows,
                      .from = strategy,
                      .to = strategy + 1});
    }
    const Error error = calls().Gather(strategies, jobs);
    ASSERT_TRUE(error.ok()) << error.text();
    for (const GatherCase& of : cases) {
      const TileLayout layout = LayoutOf(of.to);
      StoredBytes stored(layout), expected(layout);
      Get(of.tile, stored.tile);
      if (of.summaries != 0) Get(of.summaries, stored.summaries);
      kernels::GatherReference({.rows = of.rows.data(),
                                .row_count = static_cast<std::uint32_t>(of.rows.size()),
                                .from = of.from,
                                .from_layout = LayoutOf(of.from),
                                .to = of.to,
                                .to_layout = layout,
                                .tile = expected.tile.data(),
                                .summaries = expected.summaries.data()});
      EXPECT_TRUE(expected == stored) << Describe(of.to) << " rows " << of.rows.size() << ": "
                                      << FirstDifference(layout, expected.tile, stored.tile);
    }
  }
}

// A matrix with initial sums; elements below the diagonal must not change.
Bytes RandomSums(TestRandom& random, std::uint32_t head_dim) {
  Bytes sums(std::size_t{head_dim} * head_dim * sizeof(double));
  for (std::uint32_t row = 0; row < head_dim; ++row) {
    for (std::uint32_t column = 0; column < head_dim; ++column) {
      reinterpret_cast<double*>(sums.data())[std::size_t{row} * head_dim + column] =
          static_cast<double>(random.Below(1000));
    }
  }
  return sums;
}

TEST_F(TileOpsTest, MomentsAreTheReferencesSums) {
  for (const std::uint32_t head_dim : kHeadDims) {
    for (const ElementType type : kRowTypes) {
      std::vector<Bytes> expected;
      std::vector<MomentsTileJob> jobs;
      for (int i = 0; i < 2; ++i) {
        const auto count = static_cast<std::uint32_t>(random_.Between(1, 70));
        const std::uint64_t stride = head_dim * ElementBytes(type) + 16 * random_.Below(3);
        const RandomRows rows(random_, count, head_dim, type, stride, false);
        expected.push_back(RandomSums(random_, head_dim));
        jobs.push_back({.rows = Put(rows.bytes()),
                        .stride = stride,
                        .sums = Put(expected.back()),
                        .row_count = count});
        kernels::MomentsReference({.rows = rows.data(),
                                   .stride = stride,
                                   .type = type,
                                   .row_count = count,
                                   .head_dim = head_dim,
                                   .sums = reinterpret_cast<double*>(expected.back().data())});
      }
      ASSERT_TRUE(calls().Moments(head_dim, type, jobs).ok());
      for (std::size_t i = 0; i < jobs.size(); ++i) {
        Bytes sums(expected[i].size());
        Get(jobs[i].sums, sums);
        EXPECT_TRUE(sums == expected[i]);
      }
    }
  }
}

TEST_F(TileOpsTest, NoJobsAreNoWork) {
  std::optional<std::uint32_t> unusable = 7;
  EXPECT_TRUE(calls().Encode({}, ElementType::kBf16, {}, &unusable).ok());
  EXPECT_EQ(unusable, std::nullopt);
  EXPECT_TRUE(calls().Decode({}, {}).ok());
  EXPECT_TRUE(calls().Gather({}, {}).ok());
  EXPECT_TRUE(calls().Moments(64, ElementType::kBf16, {}).ok());
}

TEST(TileOpsProblems, AreNamed) {
  const TileShape shape = {
      .format = TileFormat::kPackedFp8, .head_dim = 64, .key = {64, 16}, .value = {64, 16}};
  const DeviceStrategy strategies[] = {{.shape = shape, .layout = LayoutOf(shape)}};
  constexpr std::uint64_t kTile = 4096, kOutput = 8192;  // not accessed
  DecodeTileJob decode = {.tile = kTile, .keys = kOutput, .values = kOutput, .rows = 1};
  EXPECT_EQ(DecodeProblem(strategies, decode), "");
  decode.rows = 33;
  EXPECT_NE(DecodeProblem(strategies, decode), "");
  GatherRow row = {.tile = reinterpret_cast<const std::byte*>(kTile), .row = 31, .position = 0};
  GatherTile gather = {.tile = kOutput, .rows = std::span(&row, 1)};
  EXPECT_EQ(GatherProblem(strategies, gather), "");
  row.row = 32;
  EXPECT_NE(GatherProblem(strategies, gather), "");
  row = {.tile = reinterpret_cast<const std::byte*>(kOutput), .row = 0, .position = 0};
  EXPECT_NE(GatherProblem(strategies, gather), "");
  gather = {.tile = kOutput};
  EXPECT_NE(GatherProblem(strategies, gather), "");
  TileShape summed = shape;
  summed.summary = Summary::kMinMax;
  summed.block = 4;
  const DeviceStrategy with_summaries[] = {{.shape = summed, .layout = LayoutOf(summed)}};
  row = {.tile = reinterpret_cast<const std::byte*>(kTile), .row = 0, .position = 0};
  gather = {.tile = kOutput, .rows = std::span(&row, 1)};
  EXPECT_NE(GatherProblem(with_summaries, gather), "");
  gather.summaries = kOutput + 8192 + 2;
  EXPECT_NE(GatherProblem(with_summaries, gather), "");
  gather.summaries += 2;
  EXPECT_EQ(GatherProblem(with_summaries, gather), "");
  const MomentsTileJob moments = {.rows = kTile, .stride = 128, .sums = kOutput, .row_count = 3};
  EXPECT_EQ(MomentsProblem(64, ElementType::kBf16, moments), "");
  EXPECT_NE(MomentsProblem(96, ElementType::kBf16, moments), "");
}

// ---- Index arithmetic --------------------------------------------------------------------------

TEST(EncodeIndex, RowArraysCoverATileAndItsSummariesOnce) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    const TileShape shape =
        RandomShape(random, static_cast<std::uint16_t>(kHeadDims[random.Below(3)]));
    const TileLayout layout = LayoutOf(shape);
    std::vector<int> tile(layout.bytes), summaries(layout.summary_bytes);
    std::vector<int>* seen = &tile;
    const auto mark = [&](std::uint32_t begin, std::uint32_t bytes) {
      for (std::uint32_t i = begin; i < begin + bytes; ++i) ++seen->at(i);
    };
    for (const TileRows which : {TileRows::kKey, TileRows::kValue, TileRows::kBlock}) {
      const RowArrays arrays = ArraysOf(layout, which);
      seen = which == TileRows::kBlock ? &summaries : &tile;
      const std::uint32_t rows = which == TileRows::kBlock ? shape.blocks() : kTileEntries;
      for (std::uint32_t r = 0; r < rows; ++r) {
        mark(arrays.bits + r * arrays.row.bits, arrays.row.bits);
        mark(arrays.scales + r * arrays.row.scale, arrays.row.scale);
        mark(arrays.data + r * arrays.row.data, arrays.row.data);
        // Kernels store 16-bit words there.
        EXPECT_EQ((arrays.scales + r * arrays.row.scale) % 2, 0u);
        if (arrays.row.scale == 0) {
          EXPECT_EQ((arrays.data + r * arrays.row.data) % 2, 0u);
        }
      }
    }
    const std::uint32_t gap = layout.block_data + shape.blocks() * layout.block_row.data;
    mark(gap, layout.summary_bytes - gap);
    seen = &tile;
    mark(layout.weights, shape.weights ? 128 : 0);
    mark(layout.positions, shape.positions ? 128 : 0);
    EXPECT_EQ(tile, std::vector<int>(layout.bytes, 1)) << Describe(shape);
    EXPECT_EQ(summaries, std::vector<int>(layout.summary_bytes, 1)) << Describe(shape);
  }
}

TEST(EncodeIndex, BlocksHoldEveryRowOnce) {
  for (const std::uint8_t block : {0, 4, 8, 16}) {
    const TileShape shape = {.block = static_cast<std::uint8_t>(block)};
    for (std::uint32_t rows = 1; rows <= kTileEntries; ++rows) {
      std::uint32_t total = 0;
      for (std::uint32_t b = 0; b < UsedBlocks(shape, rows); ++b) {
        EXPECT_GE(BlockRows(shape, rows, b), 1u);
        EXPECT_LE(BlockRows(shape, rows, b), block);
        total += BlockRows(shape, rows, b);
      }
      EXPECT_EQ(total, block == 0 ? 0 : rows);
    }
  }
}

template <std::uint32_t kHeadDim>
void ExpectEverySumStoredOnce() {
  using Shape = EncodeShape<kHeadDim>;
  std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
  for (std::uint32_t thread = 0; thread < Shape::kThreads; ++thread) {
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      for (std::uint32_t r = 0; r < Shape::kRowTiles; ++r) {
        for (std::uint32_t i = 0; i < 4; ++i) {
          const std::uint32_t row = r * 16 + AccumulatorRow(thread % 32, i);
          const std::uint32_t channel = thread / 32 * Shape::kWarpChannels + t * kTileColumns +
                                        AccumulatorColumn(thread % 32, i);
          EXPECT_TRUE(seen.insert({row, channel}).second);
          EXPECT_LT(row, kTileEntries);
          EXPECT_LT(channel, kHeadDim);
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), kTileEntries * kHeadDim);
}

TEST(EncodeIndex, WarpsShareTheChannels) {
  ExpectEverySumStoredOnce<64>();
  ExpectEverySumStoredOnce<128>();
  ExpectEverySumStoredOnce<256>();
}

TEST(EncodeIndex, MomentsSquaresAreThoseOnAndAboveTheDiagonal) {
  for (const std::uint32_t head_dim : kHeadDims) {
    std::uint32_t index = 0;
    for (std::uint32_t row = 0; row < head_dim / kMomentsSide; ++row) {
      for (std::uint32_t column = row; column < head_dim / kMomentsSide; ++column, ++index) {
        EXPECT_EQ(MomentsSquareAt(head_dim, index).row, row);
        EXPECT_EQ(MomentsSquareAt(head_dim, index).column, column);
      }
    }
    EXPECT_EQ(MomentsSquares(head_dim), index);
  }
}

TEST(EncodeIndex, FloorIsTheNearestBf16Below) {
  TestRandom random;
  for (int round = 0; round < 10000; ++round) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random.Bits()));
    if (!(std::fabs(value) < 0x1p127f)) continue;
    const float floor = FloorToBf16(value);
    EXPECT_LE(floor, value);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(floor) & 0xffffu, 0u);
    // The next larger bf16 exceeds the value.
    const float next = std::bit_cast<float>(std::bit_cast<std::uint32_t>(floor) +
                                            (std::signbit(floor) ? -0x10000u : 0x10000u));
    EXPECT_GT(next, value);
  }
}

}  // namespace
}  // namespace tessera::tests
