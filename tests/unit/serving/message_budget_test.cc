#include "daemon/serving/call/message_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace tessera::serving {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(MessageBudget, OneTenantHasAllOfIt) {
  MessageBudget budget(100, 1);
  const auto charge = budget.Take(TenantId(1), 100);
  EXPECT_TRUE(charge.ok());
  const absl::Status refused = budget.Take(TenantId(1), 1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("use 100 bytes"), HasSubstr("needs 1;"), HasSubstr("limit is 100")));
}

TEST(MessageBudget, NoTenantTakesAnothersPart) {
  MessageBudget budget(100, 4);
  std::optional greedy = *budget.Take(TenantId(1), 50);
  EXPECT_FALSE(budget.Take(TenantId(1), 1).ok()) << "half of all, where nobody else has any";
  const auto second = budget.Take(TenantId(2), 25);
  const auto third = budget.Take(TenantId(3), 25);
  EXPECT_TRUE(second.ok() && third.ok());
  greedy.reset();
  EXPECT_FALSE(budget.Take(TenantId(2), 1).ok()) << "others have half of all";
  EXPECT_TRUE(budget.Take(TenantId(4), 25).ok());
}

TEST(MessageBudget, WhatIsInUseAnywayCounts) {
  MessageBudget budget(100, 1);
  MessageBudget::Charge answer = budget.TakeAnyway(TenantId(1), 150);
  EXPECT_FALSE(budget.Take(TenantId(1), 1).ok());
  answer.Reset();
  EXPECT_TRUE(budget.Take(TenantId(1), 100).ok());
}

TEST(MessageBudget, AdjustsBySteps) {
  MessageBudget budget(100, 1);
  EXPECT_TRUE(budget.Adjust(TenantId(1), 0, 60));
  EXPECT_FALSE(budget.Adjust(TenantId(1), 60, 101));
  EXPECT_TRUE(budget.Adjust(TenantId(1), 60, 10));
  EXPECT_TRUE(budget.Take(TenantId(1), 90).ok());
}

TEST(MessageBudget, ChargesMove) {
  MessageBudget budget(10, 1);
  MessageBudget::Charge kept;
  {
    auto charge = budget.Take(TenantId(1), 10);
    ASSERT_TRUE(charge.ok());
    kept = *std::move(charge);
  }
  EXPECT_FALSE(budget.Take(TenantId(1), 1).ok());
  kept = MessageBudget::Charge();
  EXPECT_TRUE(budget.Take(TenantId(1), 10).ok());
}

}  // namespace
}  // namespace tessera::serving
