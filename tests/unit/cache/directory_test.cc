#include "daemon/cache/memory/directory.h"

#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

class DirectoryTest : public testing::Test {
 protected:
  DirectoryTest() {
    absl::StatusOr<std::unique_ptr<Directory>> directory =
        Directory::Create({.extent_bytes = kTestDirectoryExtent,
                           .limit_bytes = 8 * kTestDirectoryExtent,
                           .instance = 7,
                           .pool_extent_bytes = 123 * 4096,
                           .pool_limit_bytes = 456 * 4096,
                           .node = &node_,
                           .tenant = &tenant_,
                           .source = &source_,
                           .on_extent_gone = [this] { ++gone_; }});
    EXPECT_TRUE(directory.ok()) << directory.status();
    directory_ = *std::move(directory);
    EXPECT_EQ(node_.used_bytes(), kTestDirectoryExtent);  // reserved
    EXPECT_EQ(directory_->pool().extents(), 0u);          // not yet allocated
    EXPECT_TRUE(directory_->Open().ok());
    EXPECT_TRUE(directory_->Open().ok());  // no effect
    EXPECT_EQ(directory_->pool().extents(), 1u);
    EXPECT_EQ(node_.used_bytes(), kTestDirectoryExtent);
  }
  pool::Account node_{"node", 0};
  pool::Account tenant_{"tenant", 0};
  device::HostMemorySource source_{"test"};
  int gone_ = 0;
  std::unique_ptr<Directory> directory_;
};

TEST_F(DirectoryTest, TheHeaderDescribesItself) {
  const shm::DirectoryHeader& header = directory_->header();
  EXPECT_EQ(reinterpret_cast<const std::byte*>(&header), directory_->mapped().base);
  EXPECT_EQ(header.magic, shm::kDirectoryMagic);
  EXPECT_EQ(header.protocol_version, shm::kProtocolVersion);
  EXPECT_EQ(header.header_bytes, sizeof(shm::DirectoryHeader));
  EXPECT_EQ(header.layout_fingerprint, shm::kLayoutFingerprint);
  EXPECT_EQ(header.instance, 7u);
  EXPECT_EQ(header.directory_extent_bytes, kTestDirectoryExtent);
  EXPECT_EQ(header.directory_limit_bytes, 8 * kTestDirectoryExtent);
  EXPECT_EQ(header.pool_extent_bytes, 123u * 4096);
  EXPECT_EQ(header.pool_limit_bytes, 456u * 4096);
  EXPECT_EQ(header.directory_extents.load(), 1u);
  EXPECT_EQ(header.epoch.load(), 1u);
  EXPECT_EQ(header.mapping_version.load(), 1u);
}

// A directory without a session needs room in the node's account, so that its first session finds
// it there.
TEST_F(DirectoryTest, ANodeWithoutRoomIsRefusedAtTheStart) {
  pool::Account full("node", kTestDirectoryExtent - 1);
  const absl::Status status = Directory::Create({.extent_bytes = kTestDirectoryExtent,
                                                 .limit_bytes = 8 * kTestDirectoryExtent,
                                                 .instance = 7,
                                                 .pool_extent_bytes = 4096,
                                                 .pool_limit_bytes = 4096,
                                                 .node = &full,
                                                 .tenant = &tenant_,
                                                 .source = &source_,
                                                 .on_extent_gone = nullptr})
                                  .status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(full.used_bytes(), 0u);
}

TEST_F(DirectoryTest, ItsOwnGrowthIsToldAndItNeverShrinksNorTouchesItsHeader) {
  const std::vector<std::byte> header(directory_->mapped().base,
                                      directory_->mapped().base + sizeof(shm::DirectoryHeader));
  std::uint64_t version = directory_->header().mapping_version.load();
  {
    std::vector<pool::Block> blocks;
    while (true) {
      absl::StatusOr<pool::Block> block = directory_->AllocateSnapshot(shm::kMaxSegments);
      if (!block.ok()) break;
      ASSERT_GE(block->offset(), kDirectorySlabBytes);
      std::memset(block->data(), 0xff, block->bytes());
      blocks.push_back(*std::move(block));
      EXPECT_EQ(directory_->header().directory_extents.load(), directory_->pool().extents());
    }
    EXPECT_EQ(directory_->pool().extents(), 8u);
    EXPECT_EQ(directory_->header().mapping_version.load(), version + 7);
  }
  EXPECT_EQ(directory_->pool().extents(), 8u);
  EXPECT_EQ(directory_->header().directory_extents.load(), 8u);
  EXPECT_EQ(std::memcmp(header.data(), directory_->mapped().base, 64), 0);
  EXPECT_EQ(directory_->header().epoch.load(), 1u);
}

TEST_F(DirectoryTest, ABlockIsZeroedWhateverWasThere) {
  for (std::uint32_t lanes : {1u, 7u, 100u, shm::kMaxLanes}) {
    pool::Block block = *directory_->AllocateSequenceBlock(lanes);
    std::memset(block.data(), 0xff, block.bytes());
    block.Reset();
    block = *directory_->AllocateSequenceBlock(lanes);
    for (std::uint64_t i = 0; i < sizeof(shm::SequenceBlock) + 8ull * lanes; ++i) {
      ASSERT_EQ(block.data()[i], std::byte{0}) << lanes << " at " << i;
    }
  }
  EXPECT_EQ(directory_->AllocateSnapshot(shm::kMaxSegments + 1).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(DirectoryTest, ThePoolsExtentsShowWithTheirGenerations) {
  absl::StatusOr<std::unique_ptr<pool::Pool>> pool =
      pool::Pool::Create({.arena = {.extent_bytes = kTestPoolExtent,
                                    .limit_bytes = 8 * kTestPoolExtent,
                                    .node = &node_,
                                    .tag = pool::MemoryTag::kPoolExtents,
                                    .source = &source_},
                          .slab_bytes = kTestPoolExtent,
                          .tenant = &tenant_,
                          .observer = directory_->pool_observer()});
  ASSERT_TRUE(pool.ok());
  const shm::DirectoryHeader& header = directory_->header();
  for (std::uint32_t round = 1; round <= 3; ++round) {
    const std::uint64_t version = header.mapping_version.load();
    auto blocks =
        *(*pool)->AllocateMany(5, kTestPoolExtent, pool::Fit::kExact, pool::MemoryTag::kTiles);
    for (std::uint32_t i = 0; i < 5; ++i) {
      std::uint32_t generation = 0;
      ASSERT_TRUE((*pool)->ShareExtent(i, SessionId(9), &generation).ok());
      EXPECT_EQ(header.pool_extent_generation[i].load(), generation);
      EXPECT_EQ(generation, i == 0 ? 1 : round);
    }
    EXPECT_EQ(header.pool_extent_generation[5].load(), 0u);
    EXPECT_GE(header.mapping_version.load(), version + 4);
    while (blocks.size() > 1) blocks.pop_back();  // the first block and its extent remain
    blocks.clear();
    EXPECT_EQ((*pool)->extents(), 1u);
    EXPECT_EQ(header.pool_extent_generation[0].load(), 1u);
    for (std::uint32_t i = 1; i < 5; ++i) {
      EXPECT_EQ(header.pool_extent_generation[i].load(), 0u);
    }
    EXPECT_EQ(gone_, static_cast<int>(4 * round));
    EXPECT_EQ(directory_->extents_gone(), 4u * round);
  }
}

}  // namespace
}  // namespace tessera::cache
