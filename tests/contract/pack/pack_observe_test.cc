// observe: the attention that queries pay to keys.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/format/error_bound.h"
#include "tests/contract/pack/observe_case.h"
#include "tests/contract/pack/pack_conformance.h"

namespace tessera::kernels {
namespace {

// A random order of `count` keys.
std::vector<std::uint64_t> RandomOrder(std::uint64_t count, TestRandom& random) {
  std::vector<std::uint64_t> order(count);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  for (std::uint64_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  return order;
}

// The maximum difference between sums of the same shares in different orders.
constexpr double kReordered = 0x1p-20;
// Very small shares are denormal floats with few digits.
double Reordered(double share) {
  return kReordered * std::max<double>(share, std::numeric_limits<float>::min());
}

}  // namespace

TEST_P(PackConformance, ObserveAddsTheSharesOfRows) {
  TESSERA_NEEDS(observe);
  for (int round = 0; round < Rounds(60); ++round) {
    const ObserveCase observed({.max_keys = round % 10 == 0 ? 1400u : 300u}, random_);
    std::vector<double> before(observed.key_count);
    for (double& each : before) each = NormalNumber(random_);
    const char* ran = nullptr;
    const std::vector<double> sums = observed.Observe(ops(), before, 0, observed.query_count, &ran);
    ExpectRan(ran);
    const ObserveExpected expected = observed.Expected();
    for (std::uint64_t t = 0; t < observed.key_count; ++t) {
      const double tolerance = observed.logits ? subject().products.At(expected.mass[t])
                                               : expected.Tolerance(subject().shares, t);
      ASSERT_LE(std::fabs(sums[t] - before[t] - expected.sums[t]),
                tolerance + 0x1p-48 * (1 + std::fabs(expected.sums[t])))
          << "key " << t << " of " << observed.key_count << ", " << observed.query_count
          << " queries, D " << observed.head_dim << " type " << static_cast<int>(observed.type)
          << " cap " << observed.logit_softcap << (observed.logits ? " logits" : "") << ": "
          << sums[t] << " - " << before[t] << " is not " << expected.sums[t];
    }
  }
}

// The shares of a row add up to one for any logits, even saturated ones.
TEST_P(PackConformance, ObservedSharesOfARowAreOneInAll) {
  TESSERA_NEEDS(observe);
  for (int round = 0; round < Rounds(40); ++round) {
    ObserveCase observed({}, random_);
    observed.logits = false;
    if (random_.OneIn(3)) observed.scale = random_.OneIn(2) ? 1e30f : -1e30f;
    const char* ran = nullptr;
    const std::vector<double> sums = observed.Observe(ops(), &ran);
    ExpectRan(ran);
    const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
    ASSERT_NEAR(total, observed.SeeingRows(), observed.SeeingRows() * kReordered);
  }
}

TEST_P(PackConformance, ObservedKeysMayStandInAnyOrder) {
  TESSERA_NEEDS(observe);
  for (int round = 0; round < Rounds(30); ++round) {
    ObserveCase observed({.all_visible = true}, random_);
    const std::vector<double> mass = observed.Expected().mass;
    const std::vector<std::uint64_t> order = RandomOrder(observed.key_count, random_);
    const char* ran = nullptr;
    const std::vector<double> there = observed.Observe(ops(), &ran);
    observed.Permute(order);
    const std::vector<double> here = observed.Observe(ops(), &ran);
    for (std::uint64_t t = 0; t < observed.key_count; ++t) {
      const double tolerance = observed.logits ? mass[order[t]] : there[order[t]];
      ASSERT_NEAR(here[t], there[order[t]], Reordered(tolerance)) << "key " << t;
    }
  }
}

// The sums do not depend on the grouping of the queries.
TEST_P(PackConformance, ObservingTwiceIsObservingOnce) {
  TESSERA_NEEDS(observe);
  for (int round = 0; round < Rounds(30); ++round) {
    const ObserveCase observed({}, random_);
    const std::vector<double> mass = observed.Expected().mass;
    const auto first = static_cast<std::uint32_t>(random_.Between(0, observed.query_count));
    const char* ran = nullptr;
    const std::vector<double> once = observed.Observe(ops(), &ran);
    std::vector<double> twice =
        observed.Observe(ops(), std::vector<double>(observed.key_count), 0, first, &ran);
    twice = observed.Observe(ops(), std::move(twice), first, observed.query_count - first, &ran);
    for (std::uint64_t t = 0; t < observed.key_count; ++t) {
      const double tolerance = observed.logits ? mass[t] : once[t];
      ASSERT_NEAR(twice[t], once[t], Reordered(tolerance)) << "key " << t;
    }
  }
}

// A NaN query never gives a plausible number to a key it sees, and has no effect on other keys.
TEST_P(PackConformance, AnObservingNanShowsWhereItLooks) {
  TESSERA_NEEDS(observe);
  for (int round = 0; round < Rounds(20); ++round) {
    ObserveCase observed({}, random_);
    const auto row = static_cast<std::uint32_t>(random_.Below(observed.query_count));
    observed.SetQuery(row, static_cast<std::uint32_t>(random_.Below(observed.head_dim)),
                      std::numeric_limits<float>::quiet_NaN());
    const char* ran = nullptr;
    const std::vector<double> sums = observed.Observe(ops(), &ran);
    for (std::uint64_t t = 0; t < observed.key_count; ++t) {
      ASSERT_EQ(std::isnan(sums[t]),
                observed.visible_begin[row] <= t && t < observed.visible_end[row])
          << "key " << t;
    }
  }
}

}  // namespace tessera::kernels
