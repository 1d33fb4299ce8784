// The attention that queries pay to keys on a device, compared with its definition, and where the
// sums are written.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <vector>

#include "kernels/cuda/common/error_bound.h"
#include "kernels/cuda/encode/observe_index.h"
#include "tests/contract/pack/observe_case.h"
#include "tests/unit/kernels/cuda/tile_ops_rig.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::ObserveCase;
using kernels::ObserveExpected;

// Strides of rows on a device are multiples of 16 bytes.
constexpr std::uint32_t kStrideUnit = 8;

Bytes CopyOf(const void* data, std::size_t size) {
  Bytes bytes(size);
  if (size != 0) std::memcpy(bytes.data(), data, size);
  return bytes;
}
template <class Word>
Bytes CopyOf(const std::vector<Word>& words) {
  return CopyOf(words.data(), words.size() * sizeof(Word));
}

ObserveForm FormOf(const ObserveCase& observed) {
  return {.head_dim = observed.head_dim,
          .type = observed.type,
          .scale = observed.scale,
          .logit_softcap = observed.logit_softcap,
          .logits = observed.logits};
}

class ObserveTest : public TileOpsTest {
 protected:
  // A job on the device, with `before` as initial sums.
  ObserveTileJob PutJob(const ObserveCase& observed, const std::vector<double>& before) {
    return {.keys = Put(CopyOf(observed.keys->data(), observed.keys->size())),
            .key_stride = observed.key_stride,
            .key_count = observed.key_count,
            .queries = Put(CopyOf(observed.queries->data(), observed.queries->size())),
            .query_stride = observed.query_stride,
            .visible_begin = observed.no_begins ? 0 : Put(CopyOf(observed.visible_begin)),
            .visible_end = Put(CopyOf(observed.visible_end)),
            .log2_weights = observed.log2_weights.empty() ? 0 : Put(CopyOf(observed.log2_weights)),
            .sums = Put(CopyOf(before)),
            .query_count = observed.query_count};
  }
  std::vector<double> GetSums(const ObserveTileJob& job) {
    Bytes bytes(job.key_count * sizeof(double));
    if (job.key_count != 0) Get(job.sums, bytes);
    std::vector<double> sums(job.key_count);
    if (job.key_count != 0) std::memcpy(sums.data(), bytes.data(), bytes.size());
    return sums;
  }
  std::vector<double> Observe(const ObserveCase& observed) {
    const ObserveTileJob job = PutJob(observed, std::vector<double>(observed.key_count));
    EXPECT_TRUE(calls().Observe(FormOf(observed), std::span(&job, 1)).ok());
    return GetSums(job);
  }
};

void ExpectObserved(const ObserveCase& observed, const std::vector<double>& before,
                    const std::vector<double>& sums) {
  const ObserveExpected expected = observed.Expected();
  for (std::uint64_t t = 0; t < observed.key_count; ++t) {
    const double tolerance = observed.logits ? kernels::kObservedProductError * expected.mass[t]
                                             : expected.Tolerance(kObserveErrorBound, t);
    ASSERT_LE(std::fabs(sums[t] - before[t] - expected.sums[t]),
              tolerance + 0x1p-48 * (1 + std::fabs(expected.sums[t])))
        << "key " << t << " of " << observed.key_count << ", " << observed.query_count
        << " queries, D " << observed.head_dim << ": " << sums[t] << " - " << before[t]
        << " is not " << expected.sums[t];
  }
}

// Several jobs of any size in a launch.
TEST_F(ObserveTest, AddsTheSharesOfQueries) {
  for (int round = 0; round < 12; ++round) {
    std::vector<ObserveCase> cases;
    std::vector<std::vector<double>> before;
    std::vector<ObserveTileJob> jobs;
    while (cases.size() < 3) {
      ObserveCase observed({.max_keys = round % 4 == 0 ? 900u : 280u, .stride_unit = kStrideUnit},
                           random_);
      if (!cases.empty()) {  // all jobs of a launch have one form
        const ObserveCase& first = cases.front();
        if (observed.head_dim != first.head_dim || observed.type != first.type) continue;
        observed.logits = first.logits;
        observed.logit_softcap = first.logit_softcap;
      }
      before.emplace_back(observed.key_count);
      for (double& each : before.back()) each = static_cast<double>(random_.Below(5));
      jobs.push_back(PutJob(observed, before.back()));
      cases.push_back(std::move(observed));
    }
    ASSERT_TRUE(calls().Observe(FormOf(cases.front()), jobs).ok());
    for (std::size_t i = 0; i < cases.size(); ++i) {
      ExpectObserved(cases[i], before[i], GetSums(jobs[i]));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ObserveTest, SharesOfAQueryAreOneInAll) {
  for (int round = 0; round < 12; ++round) {
    ObserveCase observed({.stride_unit = kStrideUnit}, random_);
    observed.logits = false;
    if (random_.OneIn(3)) observed.scale = random_.OneIn(2) ? 1e30f : -1e30f;  // saturates
    double total = 0;
    for (const double sum : Observe(observed)) total += sum;
    ASSERT_NEAR(total, observed.SeeingRows(), observed.SeeingRows() * 0x1p-18);
  }
}

TEST_F(ObserveTest, ANanShowsWhereItLooks) {
  for (int round = 0; round < 6; ++round) {
    ObserveCase observed({.stride_unit = kStrideUnit}, random_);
    const auto row = static_cast<std::uint32_t>(random_.Below(observed.query_count));
    observed.SetQuery(row, static_cast<std::uint32_t>(random_.Below(observed.head_dim)),
                      std::numeric_limits<float>::quiet_NaN());
    const std::vector<double> sums = Observe(observed);
    for (std::uint64_t t = 0; t < observed.key_count; ++t) {
      ASSERT_EQ(std::isnan(sums[t]),
                observed.visible_begin[row] <= t && t < observed.visible_end[row])
          << "key " << t;
    }
  }
}

// The same bits, whatever else is in the launch and in any order.
TEST_F(ObserveTest, BitsDependOnTheJobAlone) {
  const ObserveCase observed({.max_keys = 700, .stride_unit = kStrideUnit}, random_);
  ObserveCase other({.stride_unit = kStrideUnit}, random_);
  while (other.head_dim != observed.head_dim || other.type != observed.type) {
    other = ObserveCase({.stride_unit = kStrideUnit}, random_);
  }
  const std::vector<double> alone = Observe(observed);
  const std::vector<double> zeros(observed.key_count);
  const ObserveTileJob jobs[] = {PutJob(other, std::vector<double>(other.key_count)),
                                 PutJob(observed, zeros)};
  ASSERT_TRUE(calls().Observe(FormOf(observed), jobs).ok());
  EXPECT_EQ(GetSums(jobs[1]), alone);
}

TEST_F(ObserveTest, NothingToSeeIsNoWork) {
  const ObserveForm form = {
      .head_dim = 64, .type = ElementType::kBf16, .scale = 1, .logit_softcap = 0, .logits = false};
  EXPECT_TRUE(calls().Observe(form, {}).ok());
  const ObserveTileJob no_keys[] = {{.query_count = 3}, {.key_count = 5}};
  EXPECT_TRUE(calls().Observe(form, no_keys).ok());
}

TEST(ObserveProblems, AreNamed) {
  const ObserveForm form = {
      .head_dim = 64, .type = ElementType::kBf16, .scale = 1, .logit_softcap = 0, .logits = false};
  const ObserveTileJob good = {.keys = 4096,  // not accessed
                               .key_stride = 128,
                               .key_count = 7,
                               .queries = 8192,
                               .query_stride = 128,
                               .visible_end = 16384,
                               .sums = 32768,
                               .query_count = 2};
  EXPECT_EQ(ObserveProblem(form, good), "");
  const auto refused = [&](auto change) {
    ObserveForm bad_form = form;
    ObserveTileJob bad = good;
    change(bad_form, bad);
    return !ObserveProblem(bad_form, bad).empty();
  };
  EXPECT_TRUE(refused([](ObserveForm& f, ObserveTileJob&) { f.head_dim = 96; }));
  EXPECT_TRUE(refused([](ObserveForm& f, ObserveTileJob&) { f.type = ElementType{0}; }));
  EXPECT_TRUE(refused([](ObserveForm&, ObserveTileJob& j) { j.keys += 8; }));
  EXPECT_TRUE(refused([](ObserveForm&, ObserveTileJob& j) { j.key_stride = 130; }));
  EXPECT_TRUE(refused([](ObserveForm&, ObserveTileJob& j) { j.queries = 0; }));
  EXPECT_TRUE(refused([](ObserveForm&, ObserveTileJob& j) { j.query_stride = 8; }));
  EXPECT_TRUE(refused([](ObserveForm&, ObserveTileJob& j) { j.visible_end = 0; }));
  EXPECT_TRUE(refused([](ObserveForm&, ObserveTileJob& j) { j.visible_begin = 4; }));
  EXPECT_TRUE(refused([](ObserveForm&, ObserveTileJob& j) { j.sums = 8; }));
  EXPECT_TRUE(
      refused([](ObserveForm&, ObserveTileJob& j) { j.key_count = kMostObservedKeys + 1; }));
}

TEST(ObserveIndex, ScratchHoldsEverythingOnce) {
  TestRandom random;
  for (int round = 0; round < 50; ++round) {
    const std::uint64_t keys = random.Between(1, 3 * kObservedKeys);
    std::uint64_t pieces = 0;
    while (pieces * kObservedKeys < keys) ++pieces;
    EXPECT_EQ(ObservePieces(keys), pieces);
    std::set<std::uint64_t> seen;
    for (std::uint32_t query = 0; query < kObservedQueries; ++query) {
      for (std::uint64_t t = 0; t < keys; ++t) {
        EXPECT_TRUE(seen.insert(ObservedLogitAt(keys, query, t)).second);
      }
      for (std::uint64_t p = 0; p < pieces; ++p) {
        EXPECT_TRUE(seen.insert(ObservedPieceAt(keys, query, p)).second);
        EXPECT_TRUE(seen.insert(ObservedPieceAt(keys, query, p) + 1).second);
      }
    }
    EXPECT_EQ(seen.size(), ObserveScratchFloats(keys));
    EXPECT_EQ(*seen.rbegin() + 1, ObserveScratchFloats(keys));
  }
}

}  // namespace
}  // namespace tessera::tests
