// Workers live random lives on one daemon, and every promise of the daemon is checked.

#include "tests/fuzz/stories/story.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/v1/admin.grpc.pb.h"
#include "tests/fakes/daemon/daemon_process.h"

namespace tessera::fuzz {
namespace {

using fakes::DaemonProcess;

struct Setting {
  const char* name;
  const char* pool_bytes;
  std::vector<std::string> flags;
  int operations;
};

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

class Stories : public testing::TestWithParam<Setting> {
 protected:
  v1::TenantStats Tenant() {
    grpc::ClientContext context;
    v1::StatsResponse stats;
    EXPECT_TRUE(admin_->NodeStats(&context, {}, &stats).ok());
    return stats.tenants(0);
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<v1::TesseraAdmin::Stub> admin_;
};

TEST_P(Stories, ComeTrueAndLeaveNothingBehind) {
  daemon_ = DaemonProcess::Start({.flags = GetParam().flags, .pool_bytes = GetParam().pool_bytes});
  ASSERT_NE(daemon_, nullptr);
  admin_ = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  TestRandom random;
  Tally tally;
  Shelf shelf;
  {
    std::vector<std::unique_ptr<client::Worker>> workers;
    std::vector<Story> stories;
    for (const bool mapped : {true, true, false}) {
      auto worker = client::Worker::Attach({.address = daemon_->address(), .map_memory = mapped});
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers.push_back(*std::move(worker));
    }
    for (std::size_t i = 0; i < workers.size(); ++i) {
      auto story = Story::Begin({.worker = workers[i].get(),
                                 .random = &random,
                                 .tally = &tally,
                                 .shelf = &shelf,
                                 .colleague = workers[(i + 1) % workers.size()].get(),
                                 .admin = admin_.get()});
      ASSERT_TRUE(story.ok()) << story.status();
      stories.push_back(*std::move(story));
    }
    for (int i = 0; i < GetParam().operations; ++i) {
      Story& story = stories[random.Below(stories.size())];
      const absl::Status status = story.Next();
      ASSERT_TRUE(status.ok()) << status << "\n" << story.Told() << daemon_->Log();
    }
  }
  for (std::size_t i = 0; i < kActs; ++i) {
    std::printf("%s %llu, ", std::string(NameOf(static_cast<Act>(i))).c_str(),
                static_cast<unsigned long long>(tally.done[i]));
  }
  std::printf("refused %llu, judged %llu\n", static_cast<unsigned long long>(tally.refused),
              static_cast<unsigned long long>(tally.outputs_judged));
  EXPECT_GT(tally.outputs_judged, 0u);
  ASSERT_EQ(FreePrefixes(*admin_), absl::OkStatus());
  // All sessions have ended and released everything; remaining memory has no readers.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  v1::TenantStats tenant = Tenant();
  while (tenant.used_bytes() + tenant.sessions() + tenant.offloaded_bytes() > 0 &&
         std::chrono::steady_clock::now() < deadline) {
    tenant = Tenant();
  }
  EXPECT_EQ(tenant.sessions(), 0u);
  EXPECT_EQ(tenant.sequences(), 0u);
  EXPECT_EQ(tenant.used_bytes(), 0u) << tenant.DebugString();
  EXPECT_EQ(tenant.observation_bytes(), 0u);
  EXPECT_EQ(tenant.offloaded_bytes(), 0u);
  EXPECT_EQ(tenant.prefixes(), 0u);
  EXPECT_EQ(tenant.sequences_failed(), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Pools, Stories,
    testing::Values(Setting{"Roomy", "512MiB", {}, 400},
                    // Some operation is refused most of the time.
                    Setting{"Tight",
                            "8MiB",
                            {"--pool-extent-bytes=2MiB", "--staging-bytes=2MiB",
                             "--raw-copy-bytes=1MiB", "--host-tier-bytes=0"},
                            400},
                    // Sequences are offloaded and restored in the background.
                    Setting{
                        "Crowded",
                        "16MiB",
                        {"--pool-extent-bytes=2MiB", "--staging-bytes=2MiB", "--offload-idle-ms=0"},
                        300},
                    // Memory pressure reaches all three stages most of the time.
                    Setting{"Pressed",
                            "32MiB",
                            {"--pool-extent-bytes=2MiB", "--staging-bytes=2MiB",
                             "--offload-idle-ms=0", "--host-tier-bytes=256KiB",
                             "--pressure-high-percent=8", "--pressure-low-percent=4"},
                            400}),
    [](const auto& setting) { return setting.param.name; });

}  // namespace
}  // namespace tessera::fuzz
