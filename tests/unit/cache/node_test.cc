#include "daemon/cache/node.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "daemon/device/cpu_device.h"
#include "tests/fakes/fake_clock.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

TEST(Node, NoTenantTakesEverySession) {
  device::CpuDevice device(kernels::BestImplementation());
  const FakeClock clock;
  Node::Options options;
  options.memory_bytes = 64 << 20;
  options.device = &device;
  options.tenants = {{.name = "a"}, {.name = "b", .token = "x"}};
  options.tenant_template.pool_extent_bytes = kTestPoolExtent;
  options.tenant_template.directory_extent_bytes = kTestDirectoryExtent;
  options.tenant_template.clock = &clock;
  options.max_sessions = 3;
  const auto node = Node::Create(options);
  ASSERT_TRUE(node.ok()) << node.status();
  Tenant& a = *(*node)->TenantByName("a");
  Tenant& b = *(*node)->TenantByName("b");
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE((*node)->AdmitSession(a).ok());
    ASSERT_TRUE(a.OpenSession({}).ok());
  }
  const absl::Status full = (*node)->AdmitSession(a);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.ToString().find("tenant a has 2 sessions; the limit is 2, of 3 on this node"),
            std::string::npos)
      << full;
  ASSERT_TRUE((*node)->AdmitSession(b).ok());
  ASSERT_TRUE(b.OpenSession({}).ok());
  EXPECT_FALSE((*node)->AdmitSession(b).ok());  // the node is full
}

}  // namespace
}  // namespace tessera::cache
