// Tiles in a pool and their separate summaries: their places, and their memory.

#include "daemon/cache/memory/tiles.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

constexpr std::uint64_t kStream = 16 * 1024;  // maximum length of contiguous summaries

kernels::TileShape AnyShape(TestRandom& random) {
  constexpr std::uint32_t kDims[] = {64, 128, 256};
  kernels::TileShape shape = kernels::DenseShape(random.Pick(kDims), kernels::ElementType::kBf16);
  if (random.OneIn(5)) return shape;
  shape.summary = random.OneIn(2) ? kernels::Summary::kMean : kernels::Summary::kMinMax;
  shape.block = static_cast<std::uint8_t>(4u << random.Below(3));
  if (random.OneIn(2)) {
    shape.format = kernels::PackedFormat(kernels::ValueType::kBf16);
    shape.group = 1;
    shape.key.kept = shape.value.kept =
        static_cast<std::uint16_t>(random.Between(1, shape.head_dim));
  }
  return shape;
}

class TilesTest : public testing::Test {
 protected:
  void SetUp() override { world_.OpenSession(); }  // the tenant's memory begins with it
  pool::Pool& pool() { return world_.tenant().pool(); }
  // From 0 to 3 runs of summaries.
  std::size_t AnyCount(const kernels::TileShape& shape) {
    const std::uint64_t each = kernels::LayoutOf(shape).summary_bytes;
    return random_.Below(each == 0 ? 40 : 3 * kStream / each);
  }

  TestRandom random_;
  World world_{{.tenant_limit = 64 << 20, .pool_extent_bytes = 8 << 20}};
};

TEST_F(TilesTest, SummariesStandSideBySideAndTheBooksAreThePools) {
  std::vector<Tiles> held;
  for (int round = 0; round < 400; ++round) {
    const kernels::TileShape shape = AnyShape(random_);
    const kernels::TileLayout layout = kernels::LayoutOf(shape);
    const std::size_t count = AnyCount(shape);
    const std::uint64_t before = pool().used_bytes();
    absl::StatusOr<Tiles> tiles = Tiles::Allocate(pool(), shape, count);
    ASSERT_TRUE(tiles.ok()) << tiles.status();
    ASSERT_EQ(tiles->size(), count);
    ASSERT_EQ(pool().used_bytes() - before, tiles->pool_bytes());
    ASSERT_EQ(tiles->pool_bytes(), Tiles::PoolBytes(shape, count));
    std::size_t breaks = 0;
    for (std::size_t i = 0; i < count; ++i) {
      if (layout.summary_bytes == 0) {
        ASSERT_EQ(tiles->summaries(i), nullptr);
        continue;
      }
      ASSERT_EQ(pool().base() + tiles->summary_offset(i), tiles->summaries(i));
      if (i > 0 && tiles->summaries(i) != tiles->summaries(i - 1) + layout.summary_bytes) ++breaks;
    }
    // Whole runs, and a remainder in groups of eight and single ones.
    if (layout.summary_bytes != 0) {
      std::size_t whole = std::max<std::uint64_t>(1, kStream / layout.summary_bytes);
      if (whole > 8) whole -= whole % 8;
      const std::size_t rest = count % whole;
      EXPECT_LE(breaks, count / whole + rest / 8 + rest % 8);
    }
    if (held.size() > 8) held.erase(held.begin());
    held.push_back(*std::move(tiles));
  }
  held.clear();
  EXPECT_EQ(pool().used_bytes(), 0u);
}

// Tiles allocated one by one in decoding are restored from host memory all at once, and take no
// more room.
TEST_F(TilesTest, ManyAtOnceTakeNoMoreThanOneByOne) {
  for (int round = 0; round < 2000; ++round) {
    const kernels::TileShape shape = AnyShape(random_);
    const std::size_t count = AnyCount(shape);
    std::size_t first = random_.Between(0, count);
    EXPECT_LE(Tiles::PoolBytes(shape, count), count * Tiles::PoolBytes(shape, 1));
    EXPECT_LE(Tiles::PoolBytes(shape, count),
              Tiles::PoolBytes(shape, first) + Tiles::PoolBytes(shape, count - first));
  }
}

// Each object size takes a separate slab, so sequences of all lengths share few sizes.
TEST_F(TilesTest, SequencesOfAllLengthsTakeFewSlabs) {
  kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
  shape.summary = kernels::Summary::kMinMax;
  shape.block = 16;
  std::vector<Tiles> held;
  for (std::size_t count = 1; count <= 80; ++count) {
    absl::StatusOr<Tiles> tiles = Tiles::Allocate(pool(), shape, count);
    ASSERT_TRUE(tiles.ok()) << tiles.status();
    held.push_back(*std::move(tiles));
  }
  std::set<std::uint64_t> slabs;  // 1 MiB each
  for (const Tiles& tiles : held) {
    for (std::size_t i = 0; i < tiles.size(); ++i) slabs.insert(tiles.summary_offset(i) >> 20);
  }
  const std::uint64_t bytes = 80 * 81 / 2 * kernels::LayoutOf(shape).summary_bytes;
  EXPECT_LE(slabs.size(), (bytes >> 20) + 1 + 3);
}

TEST_F(TilesTest, WhatIsRefusedLeavesNothing) {
  kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
  shape.summary = kernels::Summary::kMinMax;
  shape.block = 4;
  const std::uint64_t before = pool().used_bytes();
  EXPECT_TRUE(absl::IsResourceExhausted(Tiles::Allocate(pool(), shape, 10000).status()));
  EXPECT_EQ(pool().used_bytes(), before);
  world_.Validate();
}

}  // namespace
}  // namespace tessera::cache
