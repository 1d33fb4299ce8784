// Workers live random lives at the same time, each on a thread, with the daemon's threads in the
// same process, so that ThreadSanitizer sees all of them.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/api/worker_access.h"
#include "daemon/base/scheduler.h"
#include "tessera/worker.h"
#include "tests/fuzz/stories/daemon_parts.h"
#include "tests/fuzz/stories/local_transport.h"
#include "tests/fuzz/stories/story.h"

namespace tessera::fuzz {
namespace {

constexpr std::uint64_t kMib = 1 << 20;
// Instrumented code is several times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kOperations = 400;
#else
constexpr int kOperations = 1500;
#endif

struct Setting {
  const char* name;
  std::uint64_t node_bytes;
  std::uint64_t host_tier_bytes;
  std::uint32_t high_percent;
  Clock::Duration pin_limit = std::chrono::seconds(60);
};

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

class ThreadedStories : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    std::string folder = testing::TempDir() + "tessera-XXXXXX";
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    auto scheduler = ThreadScheduler::Create({.threads = 2});
    ASSERT_TRUE(scheduler.ok()) << scheduler.status();
    scheduler_ = *std::move(scheduler);
    parts_ = std::make_unique<DaemonParts>(PartsOptions());
    ASSERT_TRUE(parts_->watcher().Listen(Socket(), 0600, all_peers_).ok());
    parts_->watcher().Start();
  }
  void TearDown() override {
    parts_->connections().WaitUntilNone(clock_.Now() + std::chrono::seconds(60));
    EXPECT_EQ(parts_->connections().size(), 0u);
    // Resources of a session are released on a scheduler thread.
    cache::Tenant& tenant = *parts_->node().tenants()[0];
    const Clock::TimePoint deadline = clock_.Now() + std::chrono::seconds(60);
    while (tenant.session_count() > 0 && clock_.Now() < deadline) std::this_thread::yield();
    parts_->watcher().Stop();
    scheduler_.reset();  // its last jobs may still wake the watcher
    parts_->StopWatching();
    parts_->ExpectNothingLeft();
    parts_.reset();
    std::filesystem::remove_all(folder_);
  }
  std::string Socket() const { return folder_ + "/x.fd"; }

  DaemonParts::Options PartsOptions() {
    DaemonParts::Options options = {.node = {.memory_bytes = GetParam().node_bytes,
                                             .raw_copy_bytes = 8 * kMib,
                                             .host_tier_bytes = GetParam().host_tier_bytes,
                                             .tenants = {{.name = "all", .token = ""}},
                                             .max_sessions = 8},
                                    .clock = &clock_,
                                    .scheduler = scheduler_.get(),
                                    .pause = [](Clock::Duration) { std::this_thread::yield(); },
                                    .offload_idle = Clock::Duration::zero(),
                                    .pressure_high_percent = GetParam().high_percent,
                                    .pressure_low_percent = GetParam().high_percent / 2,
                                    .descriptor_socket = Socket()};
    cache::Tenant::Options& each = options.node.tenant_template;
    each.pool_extent_bytes = 2 * kMib;
    each.directory_extent_bytes = 2 * kMib;
    each.ring_tiles = 4;
    each.staging_bytes = kMib;
    each.tail_extent_bytes = kMib;
    each.max_models = 4;
    each.max_sequences = 200;
    each.max_prefixes = 20;
    each.pin_limit = GetParam().pin_limit;
    return options;
  }

  const SystemClock clock_;
  std::string folder_;
  std::unique_ptr<ThreadScheduler> scheduler_;
  const Published<PeerRules> all_peers_{PeerRules()};
  std::unique_ptr<DaemonParts> parts_;
};

// One worker's life, starting with its attachment.
std::string Live(DaemonParts& parts, bool mapped, std::uint64_t seed, Tally& tally) {
  TestRandom random(seed);
  Shelf shelf;  // prefixes published by one worker are found by all
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::AttachWith({.worker_name = "story", .map_memory = mapped}, {},
                         std::make_unique<LocalConnector>(parts.worker(), parts.mapped_memory()));
  if (!worker.ok()) return worker.status().ToString();
  absl::StatusOr<std::unique_ptr<client::Worker>> colleague =
      client::AttachWith({.worker_name = "colleague", .map_memory = !mapped}, {},
                         std::make_unique<LocalConnector>(parts.worker(), parts.mapped_memory()));
  if (!colleague.ok()) return colleague.status().ToString();
  absl::StatusOr<Story> story = Story::Begin({.worker = worker->get(),
                                              .random = &random,
                                              .tally = &tally,
                                              .shelf = &shelf,
                                              .colleague = colleague->get(),
                                              .pins = false});
  if (!story.ok()) return story.status().ToString();
  for (int i = 0; i < kOperations; ++i) {
    const absl::Status status = story->Next();
    if (!status.ok()) return status.ToString() + "\n" + story->Told();
  }
  return "";
}

TEST_P(ThreadedStories, ComeTrueSideBySide) {
  constexpr bool kMapped[] = {true, false, true, true};
  constexpr std::size_t kWorkers = std::size(kMapped);
  TestRandom random;
  Tally tallies[kWorkers];
  std::string wrong[kWorkers];
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kWorkers; ++i) {
    threads.emplace_back(
        [&, i, seed = random.Bits()] { wrong[i] = Live(*parts_, kMapped[i], seed, tallies[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  std::uint64_t judged = 0;
  std::uint64_t refused = 0;
  std::uint64_t retried = 0;
  for (std::size_t i = 0; i < kWorkers; ++i) {
    EXPECT_EQ(wrong[i], "") << "worker " << i;
    judged += tallies[i].outputs_judged;
    refused += tallies[i].refused;
    retried += tallies[i].retried;
  }
  EXPECT_GT(judged, 0u);
  std::cout << "judged " << judged << ", refused " << refused << ", retried " << retried
            << ", pins "
            << "taken back " << parts_->node().tenants()[0]->epochs().revoked() << std::endl;
}

constexpr Setting kSettings[] = {
    {"Roomy", 256 * kMib, 64 * kMib, 90},
    // Sequences are offloaded and restored in the background.
    {"Crowded", 14 * kMib, 64 * kMib, 50},
    // Most of the time operations are refused, or rows are re-encoded with fewer channels.
    {"Pressed", 12 * kMib, 256 << 10, 10},
// Pins are revoked in the middle of steps. Such a step reads memory that is being reused, and
// detects it. ThreadSanitizer would report these reads.
#if !defined(__SANITIZE_THREAD__)
    {"Impatient", 14 * kMib, 64 * kMib, 50, std::chrono::microseconds(100)},
#endif
};

INSTANTIATE_TEST_SUITE_P(Pools, ThreadedStories, testing::ValuesIn(kSettings),
                         [](const auto& setting) { return setting.param.name; });

}  // namespace
}  // namespace tessera::fuzz
