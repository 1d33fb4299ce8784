#include "daemon/serving/call/shares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace tessera::serving {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::vector<Shares::Held> TakeAll(Shares& shares, TenantId tenant) {
  std::vector<Shares::Held> places;
  for (;;) {
    absl::StatusOr<Shares::Held> place = shares.Take(tenant);
    if (!place.ok()) return places;
    places.push_back(*std::move(place));
  }
}

TEST(Shares, OneTenantHasAllOfIt) {
  Shares shares({.what = "calls running", .most = 10, .tenants = 1});
  EXPECT_EQ(TakeAll(shares, TenantId(1)).size(), 10u);
}

TEST(Shares, NoTenantTakesAnothersPart) {
  Shares shares({.what = "calls running", .most = 20, .tenants = 4});  // five each
  {
    const std::vector<Shares::Held> greedy = TakeAll(shares, TenantId(1));
    EXPECT_EQ(greedy.size(), 10u) << "half of all, where nobody else has any";
    const absl::Status refused = shares.Take(TenantId(1)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("has 10 calls running"), HasSubstr("limit is 10 now")));
    const std::vector<Shares::Held> second = TakeAll(shares, TenantId(2));
    const std::vector<Shares::Held> third = TakeAll(shares, TenantId(3));
    EXPECT_EQ(second.size(), 5u);
    EXPECT_EQ(third.size(), 5u);
    EXPECT_EQ(TakeAll(shares, TenantId(4)).size(), 5u) << "whoever came before";
  }
  EXPECT_EQ(TakeAll(shares, TenantId(1)).size(), 10u) << "whoever leaves gives its place back";
}

TEST(Shares, MoreTenantsMakeThePartsSmaller) {
  Shares shares({.what = "", .most = 20, .tenants = 2});
  const std::vector<Shares::Held> greedy = TakeAll(shares, TenantId(1));
  EXPECT_EQ(greedy.size(), 10u);
  shares.SetTenants(10);
  EXPECT_EQ(TakeAll(shares, TenantId(2)).size(), 2u);
}

TEST(Shares, APartIsNeverTooSmallForOne) {
  Shares shares({.what = "bytes", .most = 100, .tenants = 50, .least_part = 30});
  const auto half = shares.TakeAnyway(TenantId(1), 50);
  EXPECT_TRUE(shares.Take(TenantId(2), 30).ok());
  EXPECT_FALSE(shares.Take(TenantId(2), 31).ok());
}

TEST(Shares, WhatIsThereAnywayCounts) {
  Shares shares({.what = "bytes", .most = 100, .tenants = 1});
  Shares::Held answer = shares.TakeAnyway(TenantId(1), 150);
  EXPECT_FALSE(shares.Take(TenantId(1), 1).ok());
  answer.Reset();
  EXPECT_TRUE(shares.Take(TenantId(1), 100).ok());
}

TEST(Shares, AdjustsBySteps) {
  Shares shares({.what = "bytes", .most = 100, .tenants = 1});
  EXPECT_TRUE(shares.Adjust(TenantId(1), 0, 60));
  EXPECT_FALSE(shares.Adjust(TenantId(1), 60, 101));
  EXPECT_TRUE(shares.Adjust(TenantId(1), 60, 10));
  EXPECT_TRUE(shares.Take(TenantId(1), 90).ok());
}

TEST(Shares, WhatIsHeldMoves) {
  Shares shares({.what = "bytes", .most = 10, .tenants = 1});
  Shares::Held kept;
  {
    auto held = shares.Take(TenantId(1), 10);
    ASSERT_TRUE(held.ok());
    kept = *std::move(held);
  }
  EXPECT_FALSE(shares.Take(TenantId(1), 1).ok());
  kept = Shares::Held();
  EXPECT_TRUE(shares.Take(TenantId(1), 10).ok());
}

}  // namespace
}  // namespace tessera::serving
