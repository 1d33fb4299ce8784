#include "proto/shm/layout.h"

#include <cstddef>
#include <set>

#include "gtest/gtest.h"
#include "proto/shm/descriptors.h"
#include "tests/fakes/seed.h"

namespace tessera::shm {
namespace {

// The numbers that separately built daemons and workers agree on. A change here changes the
// protocol: increase kProtocolVersion with it.
TEST(Layout, IsWhatVersionFiveSays) {
  static_assert(kProtocolVersion == 5);
  EXPECT_EQ(sizeof(DirectoryHeader), 65728u);
  EXPECT_EQ(offsetof(DirectoryHeader, instance), 24u);
  EXPECT_EQ(offsetof(DirectoryHeader, directory_limit_bytes), 48u);
  EXPECT_EQ(sizeof(SequenceBlock), 64u);
  EXPECT_EQ(sizeof(Snapshot), 32u);
  EXPECT_EQ(sizeof(SegmentRef), 64u);
  EXPECT_EQ(offsetof(SegmentRef, value_channels), 48u);
  EXPECT_EQ(offsetof(SegmentRef, summary_table), 56u);
  EXPECT_EQ(sizeof(ReaderSlot), 64u);
  EXPECT_EQ(sizeof(ControlPage), 128u + 64 * 64 + 8 * 4096);
  EXPECT_EQ(alignof(ReaderSlot), 64u);
  EXPECT_EQ(sizeof(DescriptorOpening), 40u);
  EXPECT_EQ(sizeof(DescriptorRequest), 8u);
  EXPECT_EQ(sizeof(DescriptorAnswer), 96u);
}

TEST(Layout, MagicsReadAsText) {
  const auto text = [](std::uint64_t magic) {
    std::string out;
    for (int shift = 56; shift >= 0; shift -= 8) out += static_cast<char>(magic >> shift);
    return out;
  };
  EXPECT_EQ(text(kDirectoryMagic), "TESSDIR1");
  EXPECT_EQ(text(kControlMagic), "TESSCTL1");
  EXPECT_EQ(text(kDescriptorMagic), "TESSFDS1");
}

// Words of one session that readers spin on must not share a cache line.
TEST(Layout, HotWordsHaveCacheLinesOfTheirOwn) {
  ControlPage page{};
  std::set<std::uintptr_t> lines;
  for (ReaderSlot& slot : page.readers) {
    EXPECT_TRUE(lines.insert(reinterpret_cast<std::uintptr_t>(&slot.word) / 64).second);
  }
  EXPECT_TRUE(lines.insert(reinterpret_cast<std::uintptr_t>(&page.wake) / 64).second);
  EXPECT_TRUE(lines.insert(reinterpret_cast<std::uintptr_t>(&page.commits) / 64).second);
  EXPECT_NE(offsetof(DirectoryHeader, epoch) / 64, offsetof(DirectoryHeader, mapping_version) / 64);
}

TEST(Layout, LaneWordsKeepGenerationAndOffset) {
  TestRandom random;
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t generation = random.Below(std::uint64_t{1} << 24);
    const std::uint64_t offset = random.Below(std::uint64_t{1} << 40) * kObjectAlignment;
    const std::uint64_t word = LaneWord::Pack(generation, offset);
    ASSERT_EQ(LaneWord::Generation(word), generation);
    ASSERT_EQ(LaneWord::Offset(word), offset);
  }
  // A generation that exceeds its bits wraps and does not change the offset.
  EXPECT_EQ(LaneWord::Offset(LaneWord::Pack(~std::uint64_t{0}, 64)), 64u);
}

TEST(Layout, CommitWordsKeepGenerationAndTokens) {
  TestRandom random;
  for (int i = 0; i < 10000; ++i) {
    const auto generation = static_cast<std::uint32_t>(random.Bits());
    const std::uint64_t tokens = random.Below(std::uint64_t{1} << 47);
    std::uint64_t word = CommitWord::Pack(generation, tokens);
    ASSERT_FALSE(CommitWord::InStep(word));
    if (random.OneIn(2)) {
      word |= CommitWord::kInStep;
      ASSERT_TRUE(CommitWord::InStep(word));
    }
    ASSERT_EQ(CommitWord::Tokens(word), tokens);
    ASSERT_TRUE(CommitWord::Matches(word, generation));
    ASSERT_FALSE(CommitWord::Matches(word, generation + 1));
  }
  EXPECT_FALSE(CommitWord::Matches(0, 1));  // a new slot matches no tail
}

TEST(Layout, TheFingerprintDependsOnEveryFact) {
  static_assert(kLayoutFingerprint != 0);
  EXPECT_NE(internal::Mix(internal::Mix(1, 2), 3), internal::Mix(internal::Mix(1, 3), 2));
  EXPECT_NE(internal::Mix(1, 2), internal::Mix(1, std::uint64_t{2} << 56));
}

}  // namespace
}  // namespace tessera::shm
