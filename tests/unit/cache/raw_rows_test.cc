#include "daemon/cache/segment/raw_rows.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/rows.h"

namespace tessera::cache {
namespace {

constexpr kernels::DenseTile kTile = {.head_dim = 64, .type = kernels::ElementType::kBf16};
constexpr std::uint64_t kTileBytes = 2 * 32 * 64 * 2;
constexpr std::size_t kRow = 64 * 2;

class RawRowsTest : public testing::Test {
 protected:
  // K and V rows of `tiles` tiles, all different.
  struct Rows {
    std::vector<std::byte> keys;
    std::vector<std::byte> values;
  };
  Rows Make(std::size_t tiles) {
    Rows rows;
    rows.keys.resize(tiles * 32 * kRow);
    rows.values.resize(rows.keys.size());
    for (std::size_t i = 0; i < tiles * 32; ++i) {
      MakeRow(++stamp_, {0, 0, RowKind::kKey}, kTile, rows.keys.data() + i * kRow);
      MakeRow(stamp_, {0, 0, RowKind::kValue}, kTile, rows.values.data() + i * kRow);
    }
    return rows;
  }
  absl::Status Put(RawRows& raw, std::size_t first_tile, const Rows& rows) {
    return raw.Put(first_tile, rows.keys.data(), rows.values.data(), rows.keys.size() / kRow / 32);
  }
  // Keeps the first `tiles` of the oracle and appends `rows`.
  void Remember(std::size_t tiles, const Rows& rows) {
    kept_.keys.resize(tiles * 32 * kRow);
    kept_.values.resize(kept_.keys.size());
    kept_.keys.insert(kept_.keys.end(), rows.keys.begin(), rows.keys.end());
    kept_.values.insert(kept_.values.end(), rows.values.begin(), rows.values.end());
  }
  std::size_t tiles() const { return kept_.keys.size() / kRow / 32; }
  // Whether the first `count` rows are as expected, and nothing after them is written.
  bool Holds(const RawRows& raw, std::uint64_t count) {
    const std::size_t bytes = count * kRow;
    std::vector<std::byte> keys(bytes + 1, std::byte{0x5a}), values(keys);
    return raw.CopyTo(count, keys.data(), values.data()) && keys.back() == std::byte{0x5a} &&
           values.back() == std::byte{0x5a} &&
           std::memcmp(keys.data(), kept_.keys.data(), bytes) == 0 &&
           std::memcmp(values.data(), kept_.values.data(), bytes) == 0;
  }

  TestRandom random_;
  std::uint64_t stamp_ = 0;
  Rows kept_;
};

TEST_F(RawRowsTest, HoldWhatWasPutLastBehindWhatIsKept) {
  pool::Account budget("raw copies", 0);
  {
    RawRows raw(kTile, &budget);
    for (int round = 0; round < 50; ++round) {
      const std::size_t first = random_.Between(0, tiles());
      const Rows rows = Make(random_.Between(1, 5));
      ASSERT_TRUE(Put(raw, first, rows).ok());
      Remember(first, rows);
      ASSERT_EQ(budget.used_bytes(pool::MemoryTag::kRawCopies), tiles() * kTileBytes);
      ASSERT_TRUE(Holds(raw, tiles() * 32));
      ASSERT_TRUE(Holds(raw, random_.Between(0, tiles() * 32)));
    }
  }
  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST_F(RawRowsTest, WhatDoesNotFitTheBudgetChangesNothing) {
  pool::Account budget("raw copies", 4 * kTileBytes);
  RawRows raw(kTile, &budget);
  const Rows three = Make(3);
  ASSERT_TRUE(Put(raw, 0, three).ok());
  Remember(0, three);
  EXPECT_EQ(Put(raw, 3, Make(2)).code(), absl::StatusCode::kResourceExhausted);
  // Even if the replaced rows would have made room.
  EXPECT_EQ(Put(raw, 1, Make(2)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(budget.used_bytes(), 3 * kTileBytes);
  EXPECT_TRUE(Holds(raw, 96));
  const Rows one = Make(1);
  EXPECT_TRUE(Put(raw, 3, one).ok());
  Remember(3, one);
  EXPECT_TRUE(Holds(raw, 128));
}

TEST_F(RawRowsTest, WhatIsDroppedIsGivenBackAndStaysSo) {
  pool::Account budget("raw copies", 0);
  RawRows raw(kTile, &budget);
  ASSERT_TRUE(Put(raw, 0, Make(3)).ok());
  EXPECT_FALSE(raw.dropped());
  raw.Drop();
  raw.Drop();
  EXPECT_TRUE(raw.dropped());
  EXPECT_EQ(budget.used_bytes(), 0u);
  EXPECT_FALSE(Holds(raw, 32));
  EXPECT_EQ(Put(raw, 3, Make(1)).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(budget.used_bytes(), 0u);
}

}  // namespace
}  // namespace tessera::cache
