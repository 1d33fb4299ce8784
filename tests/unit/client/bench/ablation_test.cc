#include "client/bench/workload/ablation.h"

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::bench {
namespace {

// Averages a few instances: single differences are about three times their spread.
constexpr int kInstances = 3;

// The gain from each part of packing: rotations, a separate choice per row, small groups.
TEST(Ablation, EveryPartOfPackingCountsForSomething) {
  TestRandom random;
  GeneratedShape shape;
  shape.head_dim = 64;
  shape.tokens = 2048;
  for (const double share : {0.25, 0.375}) {
    double raw_mask = 0;
    double svd_mask = 0;
    double raw = 0;
    double rotated[3] = {};
    for (int i = 0; i < kInstances; ++i) {
      const GeneratedKv kv(shape, random.Bits());
      const absl::StatusOr<FormScores> forms =
          MeasureForms(Examination(kv, 2048, {.count = 12}), share);
      ASSERT_TRUE(forms.ok());
      EXPECT_LE(forms->raw_mask.bytes, forms->rotated[0].bytes);
      EXPECT_LE(forms->svd_mask.bytes, forms->rotated[0].bytes);
      raw_mask += forms->raw_mask.fidelity.error;
      svd_mask += forms->svd_mask.fidelity.error;
      raw += forms->raw.fidelity.error;
      for (int g = 0; g < 3; ++g) rotated[g] += forms->rotated[g].fidelity.error;
    }
    EXPECT_LT(svd_mask, raw_mask) << "SVD better than none, one mask for all rows";
    EXPECT_LT(rotated[0], raw) << "SVD better than none, each row its own channels";
    EXPECT_LT(rotated[0], svd_mask) << "per-vector better than uniform";
    EXPECT_LT(rotated[0], rotated[1]) << "groups of 1 better than of 2";
    EXPECT_LT(rotated[1], rotated[2]) << "groups of 2 better than of 4";
  }
}

TEST(Ablation, DriftingRowsWantARotationPerSegment) {
  TestRandom random;
  GeneratedShape shape;
  shape.head_dim = 64;
  shape.tokens = 8192;
  shape.regions = 4;
  const GeneratedKv kv(shape, random.Bits());
  const absl::StatusOr<RotationScores> scores =
      MeasureRotations(Examination(kv, 2048, {.count = 1}));
  ASSERT_TRUE(scores.ok());
  EXPECT_LT(scores->own_loss.key, scores->global_loss.key);
  EXPECT_LT(scores->own_loss.value, scores->global_loss.value);
  EXPECT_LT(scores->global.bytes, scores->own.bytes);
}

TEST(Ablation, ADynamicChoiceTakesNoMoreBytes) {
  TestRandom random;
  GeneratedShape shape;
  shape.head_dim = 64;
  shape.tokens = 2048;
  shape.regions = 2;
  const GeneratedKv kv(shape, random.Bits());
  const absl::StatusOr<ChoiceScores> scores = MeasureChoice(
      Examination(kv, 1024, {.count = 1}), Examination(kv, 1024, {.first = 1, .count = 1}));
  ASSERT_TRUE(scores.ok());
  EXPECT_LE(scores->dynamic.bytes, scores->fixed.bytes);
  EXPECT_GT(scores->threshold.key, 0);
  EXPECT_LT(scores->threshold.key, 1);
}

}  // namespace
}  // namespace tessera::cli::bench
