#include "client/bench/workload/block_choice.h"

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::bench {
namespace {

TEST(BlockChoice, AllBlocksAreAllMass) {
  TestRandom random;
  GeneratedShape shape;
  shape.kv_heads = 1;
  shape.tokens = 2048;
  const GeneratedKv kv(shape, random.Bits());
  const absl::StatusOr<BlockScores> scores =
      MeasureBlocks(Examination(kv, 1024, {.count = 2}), {.block = 8, .rate = 1});
  ASSERT_TRUE(scores.ok());
  for (const Fidelity* fidelity :
       {&scores->ideal, &scores->mean, &scores->min_max, &scores->packed_mean}) {
    EXPECT_NEAR(fidelity->kept_mass, 1, 1e-9);
    EXPECT_NEAR(fidelity->error, 0, 1e-9);
  }
}

// No selection recalls more than the ideal one, each recalls more than its share of the tokens, and
// a larger budget recalls more.
TEST(BlockChoice, NoneBeatsTheIdeal) {
  TestRandom random;
  GeneratedShape shape;
  shape.kv_heads = 1;
  shape.tokens = 2048;
  const GeneratedKv kv(shape, random.Bits());
  const Examination examination(kv, 1024, {.count = 4});
  for (const std::uint32_t block : {8u, 16u}) {
    BlockScores before = {};
    for (const double rate : {0.0625, 0.25}) {
      const absl::StatusOr<BlockScores> scores =
          MeasureBlocks(examination, {.block = block, .rate = rate});
      ASSERT_TRUE(scores.ok());
      for (const auto which :
           {&BlockScores::mean, &BlockScores::min_max, &BlockScores::packed_mean}) {
        const double mass = ((*scores).*which).kept_mass;
        EXPECT_LE(mass, scores->ideal.kept_mass + 1e-9);
        EXPECT_GT(mass, rate);
        EXPECT_GT(mass, (before.*which).kept_mass);
      }
      before = *scores;
    }
  }
}

}  // namespace
}  // namespace tessera::cli::bench
