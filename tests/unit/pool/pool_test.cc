#include "daemon/pool/pool.h"

#include <atomic>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/faulty_extents.h"
#include "tests/fakes/seed.h"

namespace tessera::pool {
namespace {

constexpr std::uint64_t kSlab = 16 * 1024;
constexpr std::uint64_t kExtent = 4 * kSlab;

// Tracks which extents exist, and that each change is reported once and in order.
class ExtentWatcher final : public Pool::Observer {
 public:
  void ExtentChanged(std::uint32_t index, std::uint32_t generation) override {
    EXPECT_NE(generation != 0, generations_.contains(index)) << "extent " << index;
    if (generation == 0) {
      generations_.erase(index);
      ++gone_;
    } else {
      EXPECT_GT(generation, newest_[index]);
      newest_[index] = generation;
      generations_[index] = generation;
    }
  }
  const std::map<std::uint32_t, std::uint32_t>& generations() const { return generations_; }
  int gone() const { return gone_; }

 private:
  std::map<std::uint32_t, std::uint32_t> generations_;
  std::map<std::uint32_t, std::uint32_t> newest_;
  int gone_ = 0;
};

class PoolTest : public testing::Test {
 protected:
  std::unique_ptr<Pool> Make(std::uint64_t extents, bool shrink = true) {
    absl::StatusOr<std::unique_ptr<Pool>> pool =
        Pool::Create({.arena = {.extent_bytes = kExtent,
                                .limit_bytes = extents * kExtent,
                                .node = &node_,
                                .tag = MemoryTag::kPoolExtents,
                                .source = &source_},
                      .slab_bytes = kSlab,
                      .tenant = &tenant_,
                      .observer = &watcher_,
                      .shrink = shrink});
    EXPECT_TRUE(pool.ok()) << pool.status();
    return *std::move(pool);
  }
  // Invariants between any two calls.
  void Check(const Pool& pool, std::uint64_t used) {
    pool.Validate();
    ASSERT_EQ(pool.used_bytes(), used);
    ASSERT_EQ(tenant_.used_bytes(), used);
    ASSERT_EQ(node_.used_bytes(), pool.extents() * kExtent);
    ASSERT_EQ(watcher_.generations().size(), pool.extents());
  }

  Account node_{"node", 0};
  Account tenant_{"tenant", 0};
  FaultyExtents source_;
  ExtentWatcher watcher_;
};

TEST_F(PoolTest, HoldsWhatWasWrittenThroughAnyGrowthAndShrinkage) {
  TestRandom random;
  std::unique_ptr<Pool> pool = Make(16);
  struct Object {
    Block block;
    unsigned char fill;
  };
  std::vector<Object> objects;
  std::uint64_t used = 0;
  for (int step = 0; step < 4000; ++step) {
    const bool growing = (step / 500) % 2 == 0;
    if (random.Below(10) < (growing ? 7u : 3u)) {
      const std::uint64_t bytes = random.Between(1, random.OneIn(4) ? kSlab : 2000);
      const MemoryTag tag = random.OneIn(2) ? MemoryTag::kTiles : MemoryTag::kTables;
      absl::StatusOr<Block> block =
          pool->Allocate(bytes, random.OneIn(2) ? Fit::kExact : Fit::kRounded, tag);
      if (!block.ok()) {
        ASSERT_EQ(block.status().code(), absl::StatusCode::kResourceExhausted);
        ASSERT_EQ(pool->extents(), 16u);
        continue;
      }
      ASSERT_GE(block->bytes(), bytes);
      ASSERT_EQ(block->data(), pool->base() + block->offset());
      used += block->bytes();
      const auto fill = static_cast<unsigned char>(random.Bits());
      std::memset(block->data(), fill, block->bytes());
      objects.push_back({*std::move(block), fill});
    } else if (!objects.empty()) {
      std::swap(random.Pick(objects), objects.back());
      const Object& object = objects.back();
      for (std::uint64_t i = 0; i < object.block.bytes(); ++i) {
        ASSERT_EQ(object.block.data()[i], static_cast<std::byte>(object.fill)) << step;
      }
      used -= object.block.bytes();
      objects.pop_back();
    }
    if (step % 16 == 0) Check(*pool, used);
  }
  objects.clear();
  Check(*pool, 0);
  EXPECT_EQ(pool->extents(), 1u);  // one is kept
  EXPECT_GT(watcher_.gone(), 0);
}

TEST_F(PoolTest, ALoadAroundABorderDoesNotMapAndUnmap) {
  std::unique_ptr<Pool> pool = Make(8);
  std::vector<Block> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(*pool->Allocate(kSlab, Fit::kExact, MemoryTag::kTiles));
  }
  ASSERT_EQ(pool->extents(), 1u);
  for (int i = 0; i < 100; ++i) {
    Block one = *pool->Allocate(kSlab, Fit::kExact, MemoryTag::kTiles);
  }
  EXPECT_EQ(source_.created(), 2u);
}

TEST_F(PoolTest, WithoutShrinkingExtentsStay) {
  std::unique_ptr<Pool> pool = Make(8, /*shrink=*/false);
  { auto blocks = pool->AllocateMany(20, kSlab, Fit::kExact, MemoryTag::kTiles); }
  EXPECT_EQ(pool->extents(), 5u);
  EXPECT_EQ(watcher_.gone(), 0);
}

TEST_F(PoolTest, ManyAreAllOrNoneAtTheArenasEnd) {
  std::unique_ptr<Pool> pool = Make(2);
  Block held = *pool->Allocate(kSlab, Fit::kExact, MemoryTag::kTiles);
  auto none = pool->AllocateMany(8, kSlab, Fit::kExact, MemoryTag::kTiles);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kResourceExhausted);
  Check(*pool, kSlab);
  auto all = pool->AllocateMany(7, kSlab, Fit::kExact, MemoryTag::kTiles);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->size(), 7u);
}

TEST_F(PoolTest, ManyAreAllOrNoneWhereTheDeviceRefuses) {
  std::unique_ptr<Pool> pool = Make(8);
  source_.Allow(3);
  EXPECT_FALSE(pool->AllocateMany(13, kSlab, Fit::kExact, MemoryTag::kTiles).ok());
  Check(*pool, 0);
  EXPECT_EQ(pool->extents(), 1u);
  source_.Allow(2);  // idle extents are used first
  EXPECT_TRUE(pool->AllocateMany(12, kSlab, Fit::kExact, MemoryTag::kTiles).ok());
  Check(*pool, 0);
}

TEST_F(PoolTest, AQuotaIsRespectedToTheByteAndNothingLeaks) {
  for (std::uint64_t quota = 64; quota < 64 * 40; quota += 64) {
    Account tenant("tenant", quota);
    absl::StatusOr<std::unique_ptr<Pool>> pool =
        Pool::Create({.arena = {.extent_bytes = kExtent,
                                .limit_bytes = 2 * kExtent,
                                .node = &node_,
                                .tag = MemoryTag::kPoolExtents,
                                .source = &source_},
                      .slab_bytes = kSlab,
                      .tenant = &tenant});
    ASSERT_TRUE(pool.ok());
    const bool fits = quota >= 10 * 192;
    {
      auto blocks = (*pool)->AllocateMany(10, 130, Fit::kExact, MemoryTag::kTiles);
      ASSERT_EQ(blocks.ok(), fits) << quota << " " << blocks.status();
      ASSERT_EQ(tenant.used_bytes(), fits ? 1920u : 0u);
    }
    ASSERT_EQ(tenant.used_bytes(), 0u);
    (*pool)->Validate();
  }
}

TEST_F(PoolTest, AnObjectLargerThanASlabIsRefusedWithBothSizes) {
  std::unique_ptr<Pool> pool = Make(2);
  for (std::uint64_t bytes : {kSlab + 1, kExtent, ~std::uint64_t{0}, ~std::uint64_t{0} - 62}) {
    for (Fit fit : {Fit::kExact, Fit::kRounded}) {
      const absl::StatusOr<Block> block = pool->Allocate(bytes, fit, MemoryTag::kTiles);
      EXPECT_EQ(block.status().code(), absl::StatusCode::kInvalidArgument) << bytes;
    }
  }
  EXPECT_EQ(tenant_.used_bytes(), 0u);
  EXPECT_TRUE(pool->Allocate(kSlab, Fit::kRounded, MemoryTag::kTiles).ok());
}

TEST_F(PoolTest, AnExportedExtentStaysMappedForWhoeverHoldsIt) {
  std::unique_ptr<Pool> pool = Make(4);
  const SessionId worker(7);
  std::uint32_t generation = 7;
  EXPECT_EQ(pool->ShareExtent(0, worker, &generation).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(generation, 0u);
  absl::StatusOr<AddressRange> mapping = absl::UnknownError("");
  {
    auto blocks = pool->AllocateMany(12, kSlab, Fit::kExact, MemoryTag::kTiles);
    ASSERT_TRUE(blocks.ok());
    const absl::StatusOr<device::Export> share = pool->ShareExtent(2, worker, &generation);
    ASSERT_TRUE(share.ok()) << share.status();
    EXPECT_EQ(generation, 1u);
    mapping = AddressRange::Map(share->fd.get(), kExtent, Access::kReadOnly);
    ASSERT_TRUE(mapping.ok());
    for (Block& block : *blocks) std::memset(block.data(), 5, kSlab);
    EXPECT_EQ(mapping->data()[kExtent - 1], std::byte{5});
  }
  EXPECT_EQ(pool->ShareExtent(2, worker, &generation).status().code(), absl::StatusCode::kNotFound);
  // The worker still reads the old content, and nothing newer.
  EXPECT_EQ(mapping->data()[0], std::byte{5});
  EXPECT_EQ(pool->ShareExtent(4000000000, worker, &generation).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(PoolTest, BlocksMoveAndGoOnce) {
  std::unique_ptr<Pool> pool = Make(2);
  Block a = *pool->Allocate(100, Fit::kExact, MemoryTag::kTiles);
  Block b = *pool->Allocate(200, Fit::kExact, MemoryTag::kTiles);
  const std::uint64_t offset = b.offset();
  a = std::move(b);
  EXPECT_EQ(a.offset(), offset);
  EXPECT_EQ(tenant_.used_bytes(), 256u);
  EXPECT_FALSE(b.valid());
  Block& self = a;
  a = std::move(self);
  EXPECT_TRUE(a.valid());
  a.Reset();
  a.Reset();
  EXPECT_EQ(tenant_.used_bytes(), 0u);
}

TEST_F(PoolTest, ThreadsDoNotDisturbEachOther) {
  std::unique_ptr<Pool> pool = Make(64);
  const std::uint64_t seed = TestSeed();
  std::atomic<int> overwritten{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      TestRandom random(seed + t);
      std::vector<Block> mine;
      for (int step = 0; step < 2000; ++step) {
        if (random.OneIn(2) && mine.size() < 50) {
          auto block = pool->Allocate(random.Between(1, 3000), Fit::kRounded, MemoryTag::kTiles);
          if (!block.ok()) continue;
          std::memset(block->data(), static_cast<int>(t) + 1, block->bytes());
          mine.push_back(*std::move(block));
        } else if (!mine.empty()) {
          std::swap(random.Pick(mine), mine.back());
          for (std::uint64_t i = 0; i < mine.back().bytes(); ++i) {
            overwritten += mine.back().data()[i] != static_cast<std::byte>(t + 1);
          }
          mine.pop_back();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(overwritten.load(), 0);
  Check(*pool, 0);
  EXPECT_EQ(pool->extents(), 1u);
}

}  // namespace
}  // namespace tessera::pool
