// Planes that lose the lower two bits of their 6-bit codes when memory is short.

#include <string>

#include "tests/unit/compaction/lanes/planes_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kAll = ~std::uint64_t{0};
constexpr kernels::PlaneWidths kShorter = {4, 4};

class PlanesPressed : public Planes {
 protected:
  Track CompressedWith(std::uint64_t tokens, const std::string& options) {
    return Compressed(tokens, std::string(kPlanes) + options);
  }
  kernels::PlaneWidths WidthsOf(const Track& track) {
    return View(track).segments[1].shape.key_planes;
  }
};

TEST_F(PlanesPressed, KeysLoseBitsAndTheMemoryIsThere) {
  Track track = CompressedWith(700, ",pressed=4");
  const Forms forms = FormsOf(track);
  const std::uint64_t before = track.sequence->Describe(false).tile_bytes;
  const Compactor::ReduceOutcome outcome = compactor_.Thin(*track.sequence, kAll);
  EXPECT_TRUE(outcome.allowed);
  EXPECT_TRUE(outcome.hindrance.ok()) << outcome.hindrance;
  EXPECT_EQ(outcome.gained.segments, model_->lanes());
  EXPECT_EQ(WidthsOf(track), kShorter);
  EXPECT_EQ(FormsOf(track), forms);
  EXPECT_EQ(track.sequence->Describe(false).tile_bytes, before - outcome.gained.bytes);
  const std::uint64_t tiles = 576 / kernels::kTileEntries * model_->lanes();
  const std::uint32_t dim = model_->geometry(0).head_dim;
  EXPECT_EQ(outcome.gained.bytes,
            tiles * (kernels::LayoutOf(kernels::PlanesShape(dim, {6, 4}, {4, 0})).bytes -
                     kernels::LayoutOf(kernels::PlanesShape(dim, {4, 4}, {4, 0})).bytes));
  EXPECT_EQ(Near(track, 0.1), "");
  EXPECT_TRUE(track.sequence->has_manual_changes());  // cannot be published
  EXPECT_EQ(compactor_.Thin(*track.sequence, kAll).gained.segments, 0u);
}

TEST_F(PlanesPressed, ALaneThatHasLostBitsGoesOnWithoutThem) {
  Track track = CompressedWith(400, ",pressed=4");
  for (int round = 0; round < 5; ++round) {
    compactor_.Thin(*track.sequence, kAll);
    Decode(track, random_.Between(1, 90), 1);
    RunAll();
    ASSERT_EQ(FormsOf(track).size(), 3u) << "decoded tokens join the segment";
    ASSERT_EQ(WidthsOf(track), kShorter);
    ASSERT_EQ(Near(track, 0.1), "");
  }
}

TEST_F(PlanesPressed, OnlyWhatThePolicyAllowsAndNobodyShares) {
  Track track = CompressedWith(400, "");
  const Compactor::ReduceOutcome refused = compactor_.Thin(*track.sequence, kAll);
  EXPECT_FALSE(refused.allowed);
  EXPECT_EQ(refused.gained.segments, 0u);
  Track parent = CompressedWith(400, ",pressed=4");
  Track child = Fork(parent);
  EXPECT_EQ(compactor_.Thin(*parent.sequence, kAll).gained.segments, 0u);
  EXPECT_EQ(WidthsOf(child), (kernels::PlaneWidths{6, 4}));
}

}  // namespace
}  // namespace tessera::compaction
