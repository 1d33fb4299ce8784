// Bulk rows into tiles, and the search for elements that may not be kept.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cuda/lane_index.h"
#include "kernels/cuda/params.h"
#include "tests/fakes/emulated_kernels.h"
#include "tests/unit/kernels/cuda/lanes.h"

namespace tessera::kernels::cuda {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

TEST(WriteRows, RowsLandInTheTilesOfTheirHeads) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint32_t kHeads = 2, kRows = 70, kTiles = 5;
  const DenseTile tile = {.head_dim = 128, .type = ElementType::kBf16};
  const auto row_bytes = static_cast<std::uint32_t>(tile.row_bytes());
  const std::uint64_t extent_bytes = 16 * tile.bytes();
  std::vector<Line> pool(extent_bytes / 64);
  auto* base = pool.data()->bytes;
  const std::uint64_t bases[] = {0, reinterpret_cast<std::uint64_t>(base)};
  // Tile 0 of the extent holds the tables; the others are dealt to the heads at random.
  std::vector<std::uint64_t> places;
  for (std::uint64_t i = 1; i < 16; ++i) places.push_back(extent_bytes + i * tile.bytes());
  std::shuffle(places.begin(), places.end(), random);
  std::vector<DenseTarget> targets;
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    std::memcpy(base + h * 64, places.data() + h * kTiles, kTiles * 8);
    targets.push_back({.tile_table = extent_bytes + h * 64,
                       .first_entry = static_cast<std::uint32_t>(random() % 90)});
  }
  std::vector<Line> expected = pool;
  const std::uint64_t stride = kHeads * row_bytes;
  std::vector<Line> key(kRows * stride / 64), value = key;
  for (std::vector<Line>* rows : {&key, &value}) {
    for (Line& line : *rows) {
      for (std::byte& byte : line.bytes) byte = static_cast<std::byte>(random());
    }
  }
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    for (std::uint32_t r = 0; r < kRows; ++r) {
      const std::uint32_t entry = targets[h].first_entry + r;
      std::byte* at = expected.data()->bytes + places[h * kTiles + entry / 32] - extent_bytes;
      const std::uint64_t source = r * stride + h * row_bytes;
      std::memcpy(at + tile.key_offset(entry % 32), key.data()->bytes + source, row_bytes);
      std::memcpy(at + tile.value_offset(entry % 32), value.data()->bytes + source, row_bytes);
    }
  }
  std::uint64_t fault = kNoFault;
  WriteRowsParams params = {.arena = {.extent_bases = reinterpret_cast<std::uint64_t>(bases),
                                      .extent_bytes = extent_bytes,
                                      .extents = 2},
                            .targets = targets.data(),
                            .key = key.data()->bytes,
                            .value = value.data()->bytes,
                            .fault = &fault,
                            .row_stride = stride,
                            .layer = 9,
                            .row_bytes = row_bytes,
                            .kv_heads = kHeads,
                            .rows = kRows};
  tests::EmulateWriteRows(params, seed);
  EXPECT_EQ(fault, kNoFault);
  EXPECT_EQ(std::memcmp(pool.data(), expected.data(), pool.size() * 64), 0);

  targets[1].tile_table = 2 * extent_bytes;
  tests::EmulateWriteRows(params, seed);
  EXPECT_EQ(fault, FaultWord::Pack(FaultKind::kBadTile, 9, 1));
}

class FindUnusableTest : public ::testing::TestWithParam<ElementType> {};

TEST_P(FindUnusableTest, NamesTheFirstRow) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const ElementType type = GetParam();
  constexpr std::uint32_t kHeads = 3, kRows = 9;
  const DenseTile tile = {.head_dim = 64, .type = type};
  const std::uint64_t row_bytes = tile.row_bytes();
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> bad = {infinity, -infinity, std::nanf("")};
  if (type != ElementType::kFp16) bad.insert(bad.end(), {0x1p63f, -0x1p63f, 0x1p100f});
  std::vector<float> fine = {0, -0.0f, 1, 65000, -65000, 0x1p-20f};
  if (type != ElementType::kFp16) fine.insert(fine.end(), {0x1.fp62f, -0x1.fp62f});
  for (int round = 0; round < 40; ++round) {
    std::vector<Line> rows[2];
    for (std::vector<Line>& half : rows) {
      half.resize(kRows * kHeads * row_bytes / 64);
      for (std::uint32_t i = 0; i < kRows * kHeads * 64; ++i) {
        tests::StoreElement(type, fine[random() % fine.size()],
                            half.data()->bytes + i * ElementBytes(type));
      }
    }
    std::uint64_t expected = kNoneUnusable;
    for (std::uint64_t count = random() % 4; count > 0; --count) {
      const std::uint64_t row = random() % kRows, head = random() % kHeads, of = random() % 2;
      tests::StoreElement(type, bad[random() % bad.size()],
                          rows[of].data()->bytes + (row * kHeads + head) * row_bytes +
                              random() % 64 * ElementBytes(type));
      expected = std::min(
          expected, UnusableWord::Pack(4, 1000 + row, static_cast<std::uint32_t>(head), of == 1));
    }
    std::uint64_t found = kNoneUnusable;
    tests::EmulateFindUnusable({.key = rows[0].data()->bytes,
                                .value = rows[1].data()->bytes,
                                .found = &found,
                                .row_stride = kHeads * row_bytes,
                                .first_token = 1000,
                                .layer = 4,
                                .row_bytes = static_cast<std::uint32_t>(row_bytes),
                                .kv_heads = kHeads,
                                .rows = kRows,
                                .type = type},
                               random());
    ASSERT_EQ(found, expected) << "layer " << UnusableWord::Layer(found) << " token "
                               << UnusableWord::Token(found);
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, FindUnusableTest,
                         ::testing::Values(ElementType::kBf16, ElementType::kFp16,
                                           ElementType::kFp32));

TEST(Params, ProblemsOfACallAreNamed) {
  alignas(16) std::byte memory[4096];
  std::uint64_t fault = kNoFault;
  const AttendCall good = {
      .geometry = {.query_heads = 4, .kv_heads = 2, .head_dim = 64, .scale = 1},
      .limits = {.batch = 1, .queries = 1, .works = 2},
      .step = memory,
      .query = memory,
      .output = memory,
      .scratch = memory,
      .scratch_bytes = sizeof memory,
      .fault = &fault};
  EXPECT_EQ(AttendCallProblem(good), "");
  const auto problem = [&](auto change) {
    AttendCall call = good;
    change(call);
    return std::string(AttendCallProblem(call));
  };
  EXPECT_NE(problem([](AttendCall& c) { c.geometry.head_dim = 96; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.geometry.kv_heads = 3; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.geometry.kv_heads = 0; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.limits.queries = 0; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.scratch_bytes = 16; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.step = nullptr; }), "");
  EXPECT_NE(problem([&](AttendCall& c) { c.query = memory + 4; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.query_stride = 257; }), "");
  EXPECT_EQ(RowsProblem(memory, memory, 256, 128), "");
  EXPECT_NE(RowsProblem(memory + 8, memory, 256, 128), "");
  EXPECT_NE(RowsProblem(memory, memory, 264, 128), "");
  EXPECT_NE(RowsProblem(memory, nullptr, 256, 128), "");
}

}  // namespace
}  // namespace tessera::kernels::cuda
