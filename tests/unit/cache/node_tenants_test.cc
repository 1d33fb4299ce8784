// Tenants that change while the node serves: tokens, limits, added and removed ones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/device/cpu_device.h"
#include "tests/fakes/fake_clock.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

using pool::MemoryTag;
using testing::HasSubstr;

constexpr std::uint64_t kMemory = 64 << 20;

class NodeTenants : public testing::Test {
 protected:
  using Tenants = std::vector<Node::TenantOptions>;
  static Node::TenantOptions Named(const std::string& name, const std::string& token,
                                   std::uint64_t hard = kMemory, std::uint64_t soft = kMemory) {
    return {.name = name, .token = token, .hard_limit_bytes = hard, .soft_limit_bytes = soft};
  }

  NodeTenants() {
    Node::Options options;
    options.memory_bytes = kMemory;
    options.raw_copy_bytes = 8 << 20;
    options.host_tier_bytes = 4 << 20;
    options.device = &device_;
    options.tenants = {Named("a", "x"), Named("b", "y")};
    options.tenant_template.pool_extent_bytes = kTestPoolExtent;
    options.tenant_template.directory_extent_bytes = kTestDirectoryExtent;
    options.tenant_template.clock = &clock_;
    options.max_sessions = 8;
    absl::StatusOr<std::unique_ptr<Node>> node = Node::Create(options);
    EXPECT_TRUE(node.ok()) << node.status();
    node_ = *std::move(node);
  }
  Tenant& Of(const std::string& name) { return *node_->TenantByName(name); }
  std::string NameOf(const std::string& token) {
    const absl::StatusOr<Tenant*> tenant = node_->TenantByToken(token);
    return tenant.ok() ? (*tenant)->name() : "none";
  }

  const FakeClock clock_;
  device::CpuDevice device_{kernels::BestImplementation()};
  std::unique_ptr<Node> node_;
};

TEST_F(NodeTenants, TokensAreReplaced) {
  Tenant* const a = &Of("a");
  ASSERT_TRUE(node_->SetTenants({Named("a", "new"), Named("b", "y")}).ok());
  EXPECT_EQ(NameOf("x"), "none");
  EXPECT_EQ(NameOf("new"), "a");
  EXPECT_EQ(NameOf("y"), "b");
  EXPECT_EQ(&Of("a"), a);
}

TEST_F(NodeTenants, LimitsAreReplacedAndMemoryBeyondThemStays) {
  constexpr std::uint64_t kSmall = 1 << 20;
  absl::StatusOr<pool::Charge> held = Of("a").account().Reserve(MemoryTag::kTiles, 2 * kSmall);
  ASSERT_TRUE(held.ok());
  ASSERT_TRUE(node_->SetTenants({Named("a", "x", kSmall, kSmall / 2), Named("b", "y")}).ok());
  EXPECT_EQ(Of("a").account().limit_bytes(), kSmall);
  EXPECT_EQ(Of("a").soft_limit_bytes(), kSmall / 2);
  EXPECT_EQ(Of("a").account().used_bytes(), 2 * kSmall);
  EXPECT_TRUE(absl::IsResourceExhausted(Of("a").account().Reserve(MemoryTag::kTiles, 1).status()));
  held->Reset();
  EXPECT_TRUE(Of("a").account().Reserve(MemoryTag::kTiles, kSmall).ok());
  EXPECT_FALSE(Of("a").account().Reserve(MemoryTag::kTiles, kSmall + 1).ok());
}

TEST_F(NodeTenants, AnAddedTenantServesAndSharesAreEqualAgain) {
  EXPECT_EQ(Of("a").host_rows().limit_bytes(), 4u << 20);
  EXPECT_EQ(Of("a").offloaded().limit_bytes(), 2u << 20);
  Tenants tenants = {Named("a", "x"), Named("b", "y"), Named("c", "z"), Named("d", "w")};
  ASSERT_TRUE(node_->SetTenants(tenants).ok());
  EXPECT_EQ(node_->tenants().size(), 4u);
  EXPECT_EQ(NameOf("w"), "d");
  EXPECT_EQ(node_->TenantOf(Of("d").options().id.value() << 48), &Of("d"));
  for (const char* name : {"a", "b", "c", "d"}) {
    EXPECT_EQ(Of(name).host_rows().limit_bytes(), 2u << 20);
    EXPECT_EQ(Of(name).memory().raw_copies->limit_bytes(), 3u << 19);
    EXPECT_EQ(Of(name).offloaded().limit_bytes(), 1u << 20);
  }
  EXPECT_TRUE(node_->AdmitSession(Of("d")).ok());
}

TEST_F(NodeTenants, ARemovedTenantAdmitsNobodyAndItsSessionsGoOn) {
  Tenant& b = Of("b");
  ASSERT_TRUE(node_->AdmitSession(b).ok());
  ASSERT_TRUE(node_->SetTenants({Named("a", "x")}).ok());
  EXPECT_EQ(NameOf("y"), "none");
  EXPECT_THAT(std::string(node_->AdmitSession(b).message()), HasSubstr("tenant b was removed"));
  EXPECT_EQ(node_->sessions(), 1u);
  EXPECT_EQ(node_->TenantOf(b.options().id.value() << 48), &b);
  // A place that was reserved for its first session is free for others: 8 in all.
  node_->SessionEnded(b);
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(node_->AdmitSession(Of("a")).ok()) << i;
  // It can come back.
  for (int i = 0; i < 8; ++i) node_->SessionEnded(Of("a"));
  ASSERT_TRUE(node_->SetTenants({Named("a", "x"), Named("b", "again")}).ok());
  EXPECT_EQ(NameOf("again"), "b");
  EXPECT_EQ(&Of("b"), &b);
  EXPECT_TRUE(node_->AdmitSession(b).ok());
}

TEST_F(NodeTenants, ARefusedListChangesNothing) {
  Tenants tenants = {Named("a", "new", 1 << 20)};
  for (int i = 0; i < 255; ++i) {
    tenants.push_back(Named(Concat("more-", i), Concat("token-", i)));
  }
  // "b" still counts.
  const absl::Status refused = node_->SetTenants(tenants);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("256 tenants"));
  EXPECT_EQ(node_->tenants().size(), 2u);
  EXPECT_EQ(NameOf("x"), "a");
  EXPECT_EQ(NameOf("new"), "none");
  EXPECT_EQ(Of("a").account().limit_bytes(), kMemory);
}

// For ThreadSanitizer: readers see either the old or the new settings.
TEST_F(NodeTenants, ChangesRaceWithReaders) {
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!done.load()) {
        std::uint64_t sum = 0;
        for (const std::unique_ptr<Tenant>& tenant : node_->tenants()) {
          sum += tenant->account().limit_bytes() + tenant->soft_limit_bytes();
        }
        EXPECT_GT(sum, 0u);
        const absl::StatusOr<Tenant*> tenant = node_->TenantByToken("x");
        if (tenant.ok() && node_->AdmitSession(**tenant).ok()) {
          (void)(*tenant)->account().Reserve(MemoryTag::kTiles, 1);
          node_->SessionEnded(**tenant);
        }
        EXPECT_NE(node_->TenantByName("a"), nullptr);
      }
    });
  }
  Tenants tenants = {Named("a", "x")};
  for (int i = 0; i < 20; ++i) {
    tenants.push_back(Named(Concat("t", i), Concat("token", i)));
    tenants[0].hard_limit_bytes = kMemory - i;
    ASSERT_TRUE(node_->SetTenants(tenants).ok());
    ASSERT_TRUE(node_->SetTenants({tenants.back()}).ok());
  }
  done.store(true);
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(node_->tenants().size(), 22u);
}

}  // namespace
}  // namespace tessera::cache
