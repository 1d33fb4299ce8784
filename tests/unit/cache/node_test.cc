#include "daemon/cache/tenant/node.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/device/cpu_device.h"
#include "tests/fakes/fake_clock.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

class NodeTest : public testing::Test {
 protected:
  static std::unique_ptr<Node> NewNode(std::vector<Node::TenantOptions> tenants,
                                       std::uint32_t max_sessions,
                                       std::uint64_t raw_copy_bytes = 0) {
    static device::CpuDevice device(kernels::BestImplementation());
    static const FakeClock clock;
    Node::Options options;
    options.memory_bytes = 64 << 20;
    options.device = &device;
    options.tenants = std::move(tenants);
    options.tenant_template.pool_extent_bytes = kTestPoolExtent;
    options.tenant_template.directory_extent_bytes = kTestDirectoryExtent;
    options.tenant_template.clock = &clock;
    options.max_sessions = max_sessions;
    options.raw_copy_bytes = raw_copy_bytes;
    absl::StatusOr<std::unique_ptr<Node>> node = Node::Create(options);
    EXPECT_TRUE(node.ok()) << node.status();
    return *std::move(node);
  }
};

TEST_F(NodeTest, NoTenantTakesEverySession) {
  const auto node = NewNode({{.name = "a"}, {.name = "b", .token = "x"}}, 3);
  const Tenant& a = *node->TenantByName("a");
  Tenant& b = *node->TenantByName("b");
  // Even if earlier sessions are not open yet: attachments run concurrently.
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(node->AdmitSession(a).ok());
  const absl::Status full = node->AdmitSession(a);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.ToString().find("tenant a has 2 sessions; its limit is now 2: of 3 on this node"),
            std::string::npos)
      << full;
  ASSERT_TRUE(node->AdmitSession(b).ok());
  EXPECT_FALSE(node->AdmitSession(b).ok());  // the node is full
  EXPECT_EQ(node->sessions(), 3u);
  node->SessionEnded(b);
  EXPECT_FALSE(node->AdmitSession(a).ok());
  EXPECT_TRUE(node->AdmitSession(b).ok());
}

TEST_F(NodeTest, NorDoSeveralTogether) {
  const auto node =
      NewNode({{.name = "a"}, {.name = "b", .token = "x"}, {.name = "c", .token = "y"}}, 5);
  const Tenant& c = *node->TenantByName("c");
  for (int i = 0; i < 5; ++i) {
    for (const char* name : {"a", "b"}) {
      (void)node->AdmitSession(*node->TenantByName(name));
    }
  }
  EXPECT_EQ(node->sessions(), 4u);
  EXPECT_TRUE(node->AdmitSession(c).ok());
  EXPECT_FALSE(node->AdmitSession(c).ok());
}

// Host memory for rows: each tenant has its own part, and raw copies leave room in it for
// observations.
TEST_F(NodeTest, EachTenantHasItsPartOfTheRowsThatWait) {
  constexpr std::uint64_t kPart = 4 << 20;
  const auto node = NewNode({{.name = "a"}, {.name = "b", .token = "x"}}, 3, 2 * kPart);
  const TenantMemory& a = node->TenantByName("a")->memory();
  const TenantMemory& b = node->TenantByName("b")->memory();
  using pool::MemoryTag;
  EXPECT_FALSE(a.raw_copies->Reserve(MemoryTag::kRawCopies, kPart / 4 * 3 + 1).ok());
  const auto raw = a.raw_copies->Reserve(MemoryTag::kRawCopies, kPart / 4 * 3);
  ASSERT_TRUE(raw.ok()) << raw.status();
  const auto shown = a.observations->Reserve(MemoryTag::kObservations, kPart / 4);
  ASSERT_TRUE(shown.ok()) << shown.status();
  const absl::Status full = a.observations->Reserve(MemoryTag::kObservations, 1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(full));
  EXPECT_NE(full.ToString().find("tenant a"), std::string::npos) << full;
  const auto all = b.observations->Reserve(MemoryTag::kObservations, kPart);
  EXPECT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(node->host_rows().used_bytes(), 2 * kPart);
}

}  // namespace
}  // namespace tessera::cache
