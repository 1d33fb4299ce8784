#include "daemon/serving/call/calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace tessera::serving {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::vector<Calls::Place> EnterAll(Calls& calls, TenantId tenant) {
  std::vector<Calls::Place> places;
  for (;;) {
    absl::StatusOr<Calls::Place> place = calls.Enter(tenant);
    if (!place.ok()) return places;
    places.push_back(*std::move(place));
  }
}

TEST(CallsTest, OneTenantHasAllOfThem) {
  Calls calls(10, 1);
  EXPECT_EQ(EnterAll(calls, TenantId(1)).size(), 10u);
}

TEST(CallsTest, NoTenantTakesAnothersPart) {
  Calls calls(20, 4);  // five each
  {
    const std::vector<Calls::Place> greedy = EnterAll(calls, TenantId(1));
    EXPECT_EQ(greedy.size(), 10u) << "half of all, where nobody else has any";
    const absl::Status refused = calls.Enter(TenantId(1)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(refused.ToString(),
                AllOf(HasSubstr("has 10 calls"), HasSubstr("limit is 5 while 10 or more")));
    const std::vector<Calls::Place> second = EnterAll(calls, TenantId(2));
    const std::vector<Calls::Place> third = EnterAll(calls, TenantId(3));
    EXPECT_EQ(second.size(), 5u);
    EXPECT_EQ(third.size(), 5u);
    EXPECT_EQ(EnterAll(calls, TenantId(4)).size(), 5u) << "whoever came before";
  }
  EXPECT_EQ(EnterAll(calls, TenantId(1)).size(), 10u) << "whoever leaves gives its place back";
}

TEST(CallsTest, MoreTenantsMakeTheSharesSmaller) {
  Calls calls(20, 2);
  const std::vector<Calls::Place> greedy = EnterAll(calls, TenantId(1));
  EXPECT_EQ(greedy.size(), 10u);
  calls.SetTenants(10);
  EXPECT_EQ(EnterAll(calls, TenantId(2)).size(), 2u);
}

}  // namespace
}  // namespace tessera::serving
