// Prefixes that several workers publish are stored once, whatever tokens follow them.

#include <string>
#include <vector>

#include "tessera/tessera.h"
#include "tests/e2e/prefix/prefix_lanes.h"

namespace tessera {
namespace {

TEST_F(Prefixes, TwoWorkersThatPublishTheSameEndWithOneCopy) {
  for (const std::string policy :
       {"dense", "mosaickv:sinks=0,recent=0,keep=0.5,segment=128,min_segment=32",
        "mosaickv:keep=0.5,segment=128,min_segment=32,recent=32"}) {
    SCOPED_TRACE(policy);
    const Ids ids = Count(256, policy == "dense" ? 1 : 1000);
    const std::uint64_t seed = random_.Bits();
    const std::uint64_t before = TileBytes();
    client::Sequence first = NewSequence(policy);
    SyntheticSequence truth(shape_, seed);
    Append(first, truth, 256);
    const PublishedPrefix one = Publish(first, ids);
    std::uint64_t tiles = 0;
    ASSERT_TRUE(Becomes([&] { return (tiles = TileBytes()) == TileBytes(); }));

    auto made = remote_->CreateSequence(model_, policy);
    ASSERT_TRUE(made.ok());
    client::Sequence second = *std::move(made);
    SyntheticSequence same(shape_, seed);
    Append(second, same, 256);
    EXPECT_GT(TileBytes(), tiles);
    const PublishedPrefix two = Publish(second, ids);
    EXPECT_EQ(two.prefix, one.prefix);
    EXPECT_TRUE(two.deduplicated);
    EXPECT_TRUE(two.rebased);
    EXPECT_TRUE(Becomes([&] { return TileBytes() <= tiles; })) << TileBytes() << " " << tiles;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      EXPECT_EQ(AttendByRpc(*remote_, second, same, layer),
                AttendByRpc(*mapped_, first, truth, layer));
    }
    // Both sequences can continue.
    Append(second, same, 40);
    EXPECT_EQ(second.tokens(), 296u);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      if (policy != "dense") continue;
      EXPECT_LT(same.Error(layer, 295, AttendByRpc(*remote_, second, same, layer)), 0.02);
    }
    ASSERT_TRUE(first.Free().ok());
    ASSERT_TRUE(second.Free().ok());
    ASSERT_TRUE(mapped_->Free(one.prefix).ok());
    EXPECT_FALSE(Match(*remote_, ids, policy).found());
    EXPECT_TRUE(Becomes([&] { return TileBytes() == before; }));
  }
}

// Each prompt ends with its own question, which is the usual case.
TEST_F(Prefixes, TwoWorkersWhosePromptsGoOnBehindTheHeadHaveItOnce) {
  for (const std::string policy : {"dense",
                                   "mosaickv:sinks=0,recent=0,keep=1,group=1,segment=128,"
                                   "min_segment=32,loss_k=1,loss_v=1,select=0+bf16",
                                   "mosaickv:recent=0,keep=1,group=1,segment=128,"
                                   "min_segment=32,loss_k=1,loss_v=1,select=0",
                                   "quest:tokens=4096,page=16"}) {
    for (const std::uint32_t head : {256u, 201u}) {
      SCOPED_TRACE(policy + " " + std::to_string(head));
      const std::uint64_t before = TileBytes();
      const Ids ids = Count(head, 77 * head);
      const std::uint64_t seed = random_.Bits();
      auto made = remote_->CreateSequence(model_, policy);
      ASSERT_TRUE(made.ok()) << made.status();
      client::Sequence first = *std::move(made);
      SyntheticSequence truth(shape_, seed);
      Append(first, truth, 290);
      const PublishedPrefix one = Publish(first, ids);
      EXPECT_FALSE(one.deduplicated);
      ASSERT_TRUE(first.Free().ok());
      std::uint64_t published = 0;
      ASSERT_TRUE(Becomes([&] { return (published = TileBytes()) == TileBytes(); }));

      client::Sequence second = NewSequence(policy);
      SyntheticSequence same(shape_, seed);
      Append(second, same, 300);
      Compress(second);
      std::uint64_t alone = 0;
      ASSERT_TRUE(
          Becomes([&] { return (alone = TileBytes() - published) == TileBytes() - published; }));
      std::vector<std::vector<float>> outputs;
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        outputs.push_back(AttendByRpc(*remote_, second, same, layer));
      }
      const PublishedPrefix two = Publish(second, ids);
      EXPECT_EQ(two.prefix, one.prefix);
      EXPECT_TRUE(two.deduplicated);
      EXPECT_TRUE(two.rebased);
      // Its own share is now at most four of ten tiles.
      EXPECT_TRUE(Becomes([&] { return TileBytes() - published <= alone * 4 / 10; }))
          << TileBytes() - published << " of " << alone;
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const std::vector<float> now = AttendByRpc(*remote_, second, same, layer);
        EXPECT_LT(same.Error(layer, 299, now), 0.05);
        for (std::size_t i = 0; i < now.size(); ++i) {
          EXPECT_NEAR(now[i], outputs[layer][i], 0.05);
        }
      }
      // It can continue.
      for (int i = 0; i < 40; ++i) Decode(second, same);
      EXPECT_EQ(second.tokens(), 340u);
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        EXPECT_LT(same.Error(layer, 339, AttendByRpc(*remote_, second, same, layer)), 0.05);
      }
      ASSERT_TRUE(second.Free().ok());
      ASSERT_TRUE(mapped_->Free(one.prefix).ok());
      EXPECT_TRUE(Becomes([&] { return TileBytes() == before; }));
    }
  }
}

// A shorter prefix of a published one takes no KV memory either.
TEST_F(Prefixes, AHeadOfAPrefixIsMadeOfIt) {
  client::Sequence first = NewSequence("");
  SyntheticSequence truth(shape_, 7);
  Append(first, truth, 256);
  Publish(first, Count(256));
  client::Sequence second = NewSequence("");
  SyntheticSequence same(shape_, 7);
  Append(second, same, 128);
  ASSERT_TRUE(first.Free().ok());
  std::uint64_t tiles = 0;
  ASSERT_TRUE(Becomes([&] { return (tiles = TileBytes()) == TileBytes(); }));
  const PublishedPrefix published = Publish(second, Count(128));
  EXPECT_TRUE(published.deduplicated);
  EXPECT_TRUE(published.rebased);
  EXPECT_TRUE(Becomes([&] { return 3 * TileBytes() == 2 * tiles; })) << TileBytes();
  EXPECT_EQ(TenantStats().prefixes(), 2u);
}

}  // namespace
}  // namespace tessera
