// Greedy seed clustering, compared with its definition.
#include "daemon/policies/tokens/shared/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "tests/fakes/gpu/host_key_scorer.h"
#include "tests/unit/kernels/tokens/rows.h"

namespace tessera::policies {
namespace {

using kernels::TestRows;
using testing::Each;
using testing::ElementsAre;

double PlainCosine(const std::vector<TestRows>& lanes, std::uint64_t i, std::uint64_t j) {
  double dot = 0;
  double a = 0;
  double b = 0;
  for (const TestRows& lane : lanes) {
    dot += lane.Dot(i, lane, j);
    a += lane.Dot(i, lane, i);
    b += lane.Dot(j, lane, j);
  }
  return a == 0 || b == 0 ? 0 : std::clamp(dot / std::sqrt(a * b), -1.0, 1.0);
}

std::vector<std::uint32_t> ReferenceSeeds(const std::vector<TestRows>& lanes, std::uint64_t begin,
                                          std::uint64_t end, double tau) {
  std::vector<std::uint32_t> seeds;
  for (std::uint64_t i = begin; i < end; ++i) {
    std::uint32_t seed = static_cast<std::uint32_t>(i);
    for (std::uint64_t j = begin; j < i; ++j) {
      const bool is_seed = seeds[j - begin] == j;
      if (is_seed && PlainCosine(lanes, j, i) > tau) {
        seed = static_cast<std::uint32_t>(j);
        break;
      }
    }
    seeds.push_back(seed);
  }
  return seeds;
}

// Rows around a few directions, so that clusters exist; some are zero, some equal.
std::vector<TestRows> ClusteredLanes(std::uint64_t lanes, std::uint64_t count, TestRandom& random) {
  std::vector<TestRows> rows;
  for (std::uint64_t lane = 0; lane < lanes; ++lane) rows.emplace_back(count, random);
  for (std::uint64_t i = 4; i < count; ++i) {
    const std::uint64_t like = random.Below(4);
    const bool zero = random.OneIn(20);
    const float noise = random.OneIn(5) ? 0.0f : 0.7f;
    for (TestRows& lane : rows) {
      for (std::uint32_t c = 0; c < lane.head_dim; ++c) {
        lane.row(i)[c] = zero ? 0 : lane.row(like)[c] + noise * lane.row(i)[c];
      }
    }
  }
  return rows;
}

// Cosines over all lanes, and their products.
class LaneCosines {
 public:
  explicit LaneCosines(const std::vector<TestRows>& lanes, std::uint32_t observations_per_call = 1)
      : scorer_(kernels::ReferenceOperations(), kernels::TestGeometry(), Ranges(lanes),
                observations_per_call),
        cosines_(*KeyCosines::Of(scorer_, Heads(lanes), lanes[0].count())) {}

  HostKeyScorer& scorer() { return scorer_; }
  KeyCosines& operator*() { return cosines_; }

 private:
  static std::vector<kernels::RowRange> Ranges(const std::vector<TestRows>& lanes) {
    std::vector<kernels::RowRange> ranges;
    for (const TestRows& lane : lanes) ranges.push_back(lane.range());
    return ranges;
  }
  static std::vector<std::uint32_t> Heads(const std::vector<TestRows>& lanes) {
    std::vector<std::uint32_t> heads(lanes.size());
    std::iota(heads.begin(), heads.end(), 0u);
    return heads;
  }

  HostKeyScorer scorer_;
  KeyCosines cosines_;
};

TEST(Cluster, IsItsDefinition) {
  TestRandom random;
  std::set<std::size_t> sizes;
  for (int round = 0; round < 60; ++round) {
    const std::vector<TestRows> lanes =
        ClusteredLanes(random.Between(1, 3), random.Between(5, 60), random);
    LaneCosines cosines(lanes, static_cast<std::uint32_t>(random.Between(1, 20)));
    const std::uint64_t begin = random.Below(3);
    const std::uint64_t end = lanes[0].count() - random.Below(2);
    const double tau = static_cast<double>(random.Below(1000)) / 1000 + 0.0003;
    std::vector<std::uint32_t> seeds(end - begin);
    ASSERT_TRUE(ClusterRun(*cosines, begin, end, tau, seeds).ok());
    EXPECT_EQ(seeds, ReferenceSeeds(lanes, begin, end, tau));
    sizes.insert(std::set<std::uint32_t>(seeds.begin(), seeds.end()).size());
  }
  EXPECT_GT(sizes.size(), 5u);  // makes sure that clusters exist
}

// The threshold is exclusive: at 1 nothing joins, not even equal keys.
TEST(Cluster, EqualKeysDoNotJoinAtOne) {
  TestRandom random;
  std::vector<TestRows> lanes(1, TestRows(6, random));
  for (std::uint64_t i = 1; i < 6; ++i) std::copy_n(lanes[0].row(0), 64, lanes[0].row(i));
  LaneCosines cosines(lanes);
  std::vector<std::uint32_t> seeds(6);
  ASSERT_TRUE(ClusterRun(*cosines, 0, 6, 1, seeds).ok());
  EXPECT_THAT(seeds, ElementsAre(0, 1, 2, 3, 4, 5));
  ASSERT_TRUE(ClusterRun(*cosines, 0, 6, 127.0 / 128, seeds).ok());
  EXPECT_THAT(seeds, Each(0u));
}

TEST(Cluster, ZeroKeysAreAlone) {
  TestRandom random;
  std::vector<TestRows> lanes(1, TestRows(4, random));
  std::fill(lanes[0].numbers.begin(), lanes[0].numbers.end(), 0.0f);
  LaneCosines cosines(lanes);
  std::vector<std::uint32_t> seeds(4);
  ASSERT_TRUE(ClusterRun(*cosines, 0, 4, 0, seeds).ok());
  EXPECT_THAT(seeds, ElementsAre(0, 1, 2, 3));
}

// Similarity is to the seed: a is similar to b and b to c, but c not to a.
TEST(Cluster, LikenessIsToTheSeed) {
  TestRandom random;
  std::vector<TestRows> lanes(1, TestRows(3, random));
  std::fill(lanes[0].numbers.begin(), lanes[0].numbers.end(), 0.0f);
  for (int i = 0; i < 3; ++i) {
    lanes[0].row(static_cast<std::uint64_t>(i))[0] = static_cast<float>(std::cos(0.5 * i));
    lanes[0].row(static_cast<std::uint64_t>(i))[1] = static_cast<float>(std::sin(0.5 * i));
  }
  LaneCosines cosines(lanes);
  std::vector<std::uint32_t> seeds(3);
  ASSERT_TRUE(ClusterRun(*cosines, 0, 3, 0.8, seeds).ok());
  EXPECT_THAT(seeds, ElementsAre(0, 0, 2));
}

TEST(Cluster, CountsForEveryTauAreThoseOfClustering) {
  TestRandom random;
  const std::vector<TestRows> lanes = ClusteredLanes(2, 50, random);
  LaneCosines cosines(lanes, 7);
  ClusterCounts counts;
  ASSERT_TRUE(counts.AddRun(*cosines, 0, 20).ok());
  ASSERT_TRUE(counts.AddRun(*cosines, 21, 50).ok());
  counts.AddSingle(1);
  for (std::uint32_t step = 0; step <= kTauSteps; ++step) {
    std::uint64_t expected = 1;
    for (const auto& [begin, end] : {std::pair(0, 20), std::pair(21, 50)}) {
      const std::vector<std::uint32_t> seeds =
          ReferenceSeeds(lanes, static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(end),
                         static_cast<double>(step) / kTauSteps);
      expected += std::set<std::uint32_t>(seeds.begin(), seeds.end()).size();
    }
    EXPECT_EQ(counts.counts()[step], expected) << step;
  }
}

// Rows computed one by one or many at once are the same, but need fewer calls.
TEST(Cluster, RowsDoNotDependOnHowManyAreLookedAtAtOnce) {
  TestRandom random;
  const std::vector<TestRows> lanes = ClusteredLanes(2, 40, random);
  LaneCosines single(lanes);
  LaneCosines many(lanes, 16);
  for (std::uint64_t i = 0; i < 40; ++i) {
    const auto one = (*single).Row(i, 40);
    const auto other = (*many).Row(i, 40);
    ASSERT_TRUE(one.ok() && other.ok());
    EXPECT_TRUE(std::ranges::equal(*one, *other)) << i;
  }
  EXPECT_EQ(single.scorer().calls(), 2u + 2 * 40);
  EXPECT_EQ(many.scorer().calls(), 2u + 2 * 3);
}

// Any error of the scorer is returned, and no rows of a failed call are used.
TEST(Cluster, ErrorsAreTold) {
  TestRandom random;
  const std::vector<TestRows> lanes = ClusteredLanes(2, 12, random);
  std::vector<std::uint32_t> seeds(12);
  LaneCosines unhurt(lanes, 5);
  ASSERT_TRUE(ClusterRun(*unhurt, 0, 12, 0.999, seeds).ok());
  for (std::uint64_t calls = 2; calls < unhurt.scorer().calls(); ++calls) {
    LaneCosines cosines(lanes, 5);
    cosines.scorer().FailAfter(calls);
    EXPECT_EQ(ClusterRun(*cosines, 0, 12, 0.999, seeds).code(), absl::StatusCode::kUnavailable);
    ClusterCounts counts;
    EXPECT_EQ(counts.AddRun(*cosines, 0, 12).code(), absl::StatusCode::kUnavailable);
  }
  HostKeyScorer gone(kernels::ReferenceOperations(), kernels::TestGeometry(), {lanes[0].range()});
  gone.FailAfter(0);
  EXPECT_EQ(KeyCosines::Of(gone, {0}, 12).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tessera::policies
