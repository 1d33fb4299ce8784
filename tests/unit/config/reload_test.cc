#include "daemon/config/reload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/bytes.h"

namespace tessera::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::uint64_t kPool = 2 * kGiB;

class ReloadPlanTest : public ::testing::Test {
 protected:
  ReloadPlanTest() {
    running_.tenants = {{.name = "a", .token = "x"}, {.name = "b", .token = "y"}};
    running_.pool_bytes = kPool;
    EXPECT_TRUE(ResolveDefaults(memory_, running_).ok());
    EXPECT_TRUE(Validate(running_, memory_).ok());
  }
  absl::StatusOr<ReloadPlan> Plan(const Config& fresh) const {
    return PlanReload(running_, fresh, memory_);
  }

  const DeviceMemory memory_ = {.bytes = 8 * kGiB, .source = "the test"};
  Config running_;
};

TEST_F(ReloadPlanTest, NothingChangedIsNothingToDo) {
  const auto plan = Plan(running_);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->config, running_);
  EXPECT_THAT(plan->applied, IsEmpty());
  EXPECT_THAT(plan->needs_restart, IsEmpty());
}

TEST_F(ReloadPlanTest, AFileWithoutTenantsDoesNotOpenTheDaemon) {
  for (const std::vector<Tenant>& tenants : {std::vector<Tenant>{}, Config().tenants}) {
    Config fresh = running_;
    fresh.tenants = tenants;
    const auto plan = Plan(fresh);
    EXPECT_TRUE(absl::IsInvalidArgument(plan.status())) << plan.status();
    EXPECT_NE(plan.status().message().find("no tenant would need a token"), std::string::npos);
  }
}

TEST_F(ReloadPlanTest, EachReloadableFieldIsApplied) {
  const std::vector<std::pair<std::string, std::function<void(Config&)>>> changes = {
      {"drain_limit_ms", [](Config& c) { c.drain_limit = std::chrono::milliseconds(1); }},
      {"log_level", [](Config& c) { c.log_level = LogLevel::kDebug; }},
      {"slow_call_ms", [](Config& c) { c.slow_call = std::chrono::milliseconds(5); }},
      {"unix_peers", [](Config& c) { c.unix_peers.uids = {7}; }},
      {"tenants", [](Config& c) { c.tenants[1].token = "z"; }},
      {"tenants", [](Config& c) { c.tenants[1].soft_limit_bytes = kGiB; }},
      {"tenants", [](Config& c) { c.tenants[1].hard_limit_bytes -= kGiB; }},
      {"tenants", [](Config& c) { c.tenants.pop_back(); }},
      {"tenants",
       [](Config& c) {
         c.tenants.push_back(c.tenants[0]);
         c.tenants.back().name = c.tenants.back().token = "new";
       }},
  };
  for (const auto& [field, change] : changes) {
    Config fresh = running_;
    change(fresh);
    fresh.tenants[0].soft_limit_bytes = fresh.tenants[0].hard_limit_bytes;
    for (Tenant& tenant : fresh.tenants) {
      tenant.soft_limit_bytes = std::min(tenant.soft_limit_bytes, tenant.hard_limit_bytes);
    }
    const auto plan = Plan(fresh);
    ASSERT_TRUE(plan.ok()) << field << ": " << plan.status();
    EXPECT_EQ(plan->config, fresh) << field;
    EXPECT_THAT(plan->applied, ElementsAre(field));
    EXPECT_THAT(plan->needs_restart, IsEmpty()) << field;
    EXPECT_TRUE(IsReloadable(field));
  }
}

TEST_F(ReloadPlanTest, OtherFieldsKeepTheirValuesAndAreNamed) {
  Config fresh = running_;
  fresh.max_sessions = 7;
  fresh.listen.push_back({.unix_path = "/run/other.sock", .tcp = {}});
  fresh.tls_certificate_file = "/etc/other.pem";
  fresh.tls_key_file = "/etc/other.key";
  fresh.metrics_address.reset();
  fresh.log_level = LogLevel::kError;
  const auto plan = Plan(fresh);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->applied, ElementsAre("log_level"));
  EXPECT_THAT(plan->needs_restart,
              testing::UnorderedElementsAre("listen", "max_sessions", "metrics_address",
                                            "tls_certificate_file", "tls_key_file"));
  Config expected = running_;
  expected.log_level = LogLevel::kError;
  EXPECT_EQ(plan->config, expected);
}

TEST_F(ReloadPlanTest, ATenantWithoutALimitOfItsOwnKeepsThatOfTheRunningPool) {
  Config fresh = running_;
  fresh.pool_bytes = kPool * 2;
  for (Tenant& tenant : fresh.tenants) {
    tenant.soft_limit_bytes = tenant.hard_limit_bytes = fresh.pool_bytes;
  }
  const auto plan = Plan(fresh);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_THAT(plan->applied, IsEmpty());
  EXPECT_THAT(plan->needs_restart, ElementsAre("pool_bytes"));
}

TEST_F(ReloadPlanTest, ADerivedReserveFollowsTheRunningPoolAndTheTenants) {
  Config fresh = Config();
  fresh.pool_bytes = kPool * 2;
  fresh.tenants = {{.name = "a", .token = "x"},
                   {.name = "b", .token = "y"},
                   {.name = "c", .token = "z", .reserved_bytes = kMiB}};
  ASSERT_TRUE(ResolveDefaults(memory_, fresh).ok());
  const auto plan = Plan(fresh);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->config.tenants[0].reserved_bytes, kPool / 6);
  EXPECT_EQ(plan->config.tenants[2].reserved_bytes, kMiB);
}

TEST_F(ReloadPlanTest, ALimitThatNeedsALargerPoolIsRefused) {
  Config fresh = running_;
  fresh.pool_bytes = kPool * 2;
  for (Tenant& tenant : fresh.tenants) tenant.soft_limit_bytes = fresh.pool_bytes;
  fresh.tenants[0].hard_limit_bytes = fresh.tenants[0].soft_limit_bytes = kPool + kGiB;
  fresh.tenants[1].hard_limit_bytes = fresh.pool_bytes;
  const auto plan = Plan(fresh);
  EXPECT_TRUE(absl::IsInvalidArgument(plan.status())) << plan.status();
  EXPECT_THAT(std::string(plan.status().message()),
              testing::AllOf(HasSubstr("need a restart"), HasSubstr("pool_bytes")));
}

}  // namespace
}  // namespace tessera::config
