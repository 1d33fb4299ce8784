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
                                       std::uint32_t max_sessions, std::uint64_t raw_copy_bytes = 0,
                                       std::uint32_t limits = 0) {
    static device::CpuDevice device(kernels::BestImplementation());
    static const FakeClock clock;
    Node::Options options;
    options.memory_bytes = 64 << 20;
    options.device = &device;
    options.tenants = std::move(tenants);
    options.tenant_template.pool_extent_bytes = kTestPoolExtent;
    options.tenant_template.directory_extent_bytes = kTestDirectoryExtent;
    options.tenant_template.clock = &clock;
    options.tenant_template.ring_tiles = 2;
    options.tenant_template.max_models = limits;
    options.tenant_template.max_sequences = limits;
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

TEST_F(NodeTest, EachTenantIsGuaranteedHalfOfAnEqualShareOfTheSessions) {
  const auto node = NewNode({{.name = "a"}, {.name = "b", .token = "x"}}, 64);
  const Tenant& a = *node->TenantByName("a");
  Tenant& b = *node->TenantByName("b");
  ASSERT_TRUE(node->AdmitSession(b).ok());
  int admitted = 0;
  while (node->AdmitSession(a).ok()) ++admitted;
  EXPECT_EQ(admitted, 48);
  for (int i = 1; i < 16; ++i) EXPECT_TRUE(node->AdmitSession(b).ok()) << i;
  EXPECT_FALSE(node->AdmitSession(b).ok());
  node->SessionEnded(b);
  EXPECT_FALSE(node->AdmitSession(a).ok());
}

TEST_F(NodeTest, ATenantMayHaveALimitOfItsOwn) {
  const auto node = NewNode({{.name = "a", .max_sessions = 2}, {.name = "b", .token = "x"}}, 64);
  const Tenant& a = *node->TenantByName("a");
  const Tenant& b = *node->TenantByName("b");
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(node->AdmitSession(a).ok());
  const absl::Status third = node->AdmitSession(a);
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(third.ToString().find("tenant a has 2 sessions; its limit is 2"), std::string::npos)
      << third;
  int admitted = 0;
  while (node->AdmitSession(b).ok()) ++admitted;
  EXPECT_EQ(admitted, 62) << "nothing is kept for a beyond its limit";
}

// All but one tenant take what they get. The last one attaches and appends nevertheless.
TEST_F(NodeTest, TheLastTenantIsServedWhateverOthersTake) {
  constexpr std::size_t kTenants = 4;
  constexpr std::uint64_t kReserve = (64 << 20) / (2 * kTenants);
  std::vector<Node::TenantOptions> options;
  for (std::size_t i = 0; i < kTenants; ++i) {
    const std::string name = "t" + std::to_string(i);
    options.push_back({.name = name, .token = name, .reserved_bytes = kReserve});
  }
  const auto node = NewNode(options, 16, 0, /*limits=*/1000);
  std::vector<std::pair<Tenant*, std::shared_ptr<SessionState>>> sessions;
  const auto attach = [&](Tenant& tenant) -> std::shared_ptr<SessionState> {
    if (!node->AdmitSession(tenant).ok()) return nullptr;
    absl::StatusOr<std::shared_ptr<SessionState>> session = tenant.OpenSession({});
    if (!session.ok()) {
      node->SessionEnded(tenant);
      return nullptr;
    }
    sessions.emplace_back(&tenant, *session);
    return *session;
  };
  // Appends until the tenant is refused, and returns how many sequences it has then.
  const auto fill = [&](Tenant& tenant, SessionState& session) {
    const auto model = *tenant.RegisterModel(SmallModel("m", 2, 2), session.id());
    int count = 0;
    for (;; ++count) {
      const auto sequence = tenant.CreateSequence(session, model->id());
      if (!sequence.ok()) return count;
      if (!AppendAll(**sequence, 0, NewStamps(1000)).ok()) return count;
    }
  };
  for (int turn = 0; turn < 16; ++turn) {
    for (std::size_t i = 0; i + 1 < kTenants; ++i) (void)attach(*node->tenants()[i]);
  }
  EXPECT_EQ(sessions.size(), 14u);
  std::vector<int> counts;
  for (std::size_t i = 0; i + 1 < kTenants; ++i) {
    counts.push_back(fill(*sessions[i].first, *sessions[i].second));
  }
  EXPECT_GT(counts[0], 25) << "what is not guaranteed is lent";
  EXPECT_GE(counts[1], 6);
  EXPECT_GE(counts[2], 6);

  Tenant& last = *node->tenants()[kTenants - 1];
  const auto session = attach(last);
  ASSERT_NE(session, nullptr);
  EXPECT_NE(attach(last), nullptr);
  EXPECT_GE(fill(last, *session), 6);
  for (auto& [tenant, held] : sessions) {
    tenant->EndSession(held->id());
    node->SessionEnded(*tenant);
  }
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
