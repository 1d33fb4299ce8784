// Shared fixture of the memory pressure tests: a node under pressure on a fake clock.
#pragma once

#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "daemon/residency/offload_idle.h"
#include "daemon/residency/pressure.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/unit/cache/world.h"

namespace tessera::residency {

// Whole extents, and room for the state of sequences, which is charged like the pool.
inline constexpr std::uint64_t kNode = 16 * kMiB + 256 * kKiB;
inline constexpr Clock::Duration kIdle = std::chrono::seconds(3);
inline constexpr std::uint64_t kTokens = 1000;  // per sequence: about 1 MiB

struct Limits {
  std::uint64_t soft = 0;
  std::uint64_t hard = 0;
  std::uint64_t reserved = 0;
};

class PressureTest : public testing::Test {
 protected:
  void Build(const std::vector<Limits>& tenants, std::uint64_t tier = 64 * kMiB,
             std::vector<std::unique_ptr<Measure>> before = {}) {
    cache::Node::Options options = {
        .memory_bytes = kNode, .host_tier_bytes = tier, .device = &device_, .max_sessions = 8};
    for (const Limits& limits : tenants) {
      const std::string name = "t" + std::to_string(options.tenants.size());
      options.tenants.push_back({.name = name,
                                 .token = name,
                                 .hard_limit_bytes = limits.hard,
                                 .soft_limit_bytes = limits.soft,
                                 .reserved_bytes = limits.reserved});
    }
    options.tenant_template = {.pool_extent_bytes = cache::kTestPoolExtent,
                               .directory_extent_bytes = cache::kTestDirectoryExtent,
                               .ring_tiles = 2,
                               .staging_bytes = cache::kTestStaging,
                               .tail_extent_bytes = cache::kTestTailExtent,
                               .max_models = 4,
                               .max_sequences = 1000,
                               .max_prefixes = 100,
                               .pin_limit = std::chrono::seconds(5),
                               .clock = &clock_,
                               .on_attention = [] {}};
    auto node = cache::Node::Create(options);
    ASSERT_TRUE(node.ok()) << node.status();
    node_ = *std::move(node);
    Pressure::Options ladder = {.node = node_.get(),
                                .scheduler = &scheduler_,
                                .logger = &logger_,
                                .clock = &clock_,
                                .pause = [this](Clock::Duration time) {
                                  ++pauses_;
                                  if (on_pause_) on_pause_();
                                  clock_.Advance(time);
                                }};
    if (patience_.has_value()) ladder.patience = *patience_;
    ladder.ladder = std::move(before);
    ladder.ladder.push_back(std::make_unique<OffloadIdle>(OffloadIdle::Options{
        .clock = &clock_, .node = node_.get(), .idle = kIdle, .at_work = at_work_}));
    pressure_.emplace(std::move(ladder));
    for (std::size_t i = 0; i < tenants.size(); ++i) {
      auto session = tenant(i).OpenSession({.worker_name = "test"});
      ASSERT_TRUE(session.ok()) << session.status();
      sessions_.push_back(*session);
      auto model = tenant(i).RegisterModel(cache::SmallModel("m", 2, 2), (*session)->id());
      ASSERT_TRUE(model.ok());
      models_.push_back(*model);
    }
  }
  void TearDown() override {
    for (std::size_t i = 0; i < sessions_.size(); ++i) tenant(i).EndSession(sessions_[i]->id());
    sessions_.clear();
    const std::size_t tenants = models_.size();
    models_.clear();
    for (std::size_t i = 0; i < tenants; ++i) {
      tenant(i).epochs().Collect();
      EXPECT_EQ(tenant(i).account().used_bytes(), 0u);
      EXPECT_EQ(tenant(i).offloaded().used_bytes(), 0u);
    }
    EXPECT_EQ(node_->host_tier().used_bytes(), 0u);
  }
  cache::Tenant& tenant(std::size_t i) { return *node_->tenants()[i]; }

  // Adds a sequence, which may be refused.
  absl::Status Add(std::size_t i, std::shared_ptr<cache::Sequence>* out = nullptr,
                   std::uint64_t tokens = kTokens) {
    auto sequence = tenant(i).CreateSequence(*sessions_[i], models_[i]->id());
    if (!sequence.ok()) return sequence.status();
    const absl::Status status = cache::AppendAll(**sequence, 0, cache::NewStamps(tokens)).status();
    if (!status.ok()) {
      (void)tenant(i).FreeSequence((*sequence)->id());
    } else if (out != nullptr) {
      *out = *sequence;
    }
    return status;
  }
  // Adds this many sequences, one second apart.
  std::vector<std::shared_ptr<cache::Sequence>> Fill(std::size_t i, int count) {
    std::vector<std::shared_ptr<cache::Sequence>> sequences(count);
    for (auto& sequence : sequences) {
      EXPECT_TRUE(Add(i, &sequence).ok());
      clock_.Advance(std::chrono::seconds(1));
    }
    return sequences;
  }
  absl::Status AddWithRelief(std::size_t i, std::shared_ptr<cache::Sequence>* out = nullptr) {
    return pressure_->RetryWhenPoolFull(
        tenant(i), [&] { return Add(i, out); }, [this] { return gone_; });
  }
  static std::string Gone(const std::vector<std::shared_ptr<cache::Sequence>>& sequences) {
    std::string text;
    for (const auto& sequence : sequences) text += sequence->offloaded() ? '-' : 'x';
    return text;
  }
  std::uint64_t Climbs(Outcome outcome, std::size_t rung = 0) {
    return pressure_->counters().rungs[rung].climbs[static_cast<std::size_t>(outcome)].load();
  }

  // Log lines of this event so far.
  std::vector<std::string> Logged(std::string_view event) const {
    std::vector<std::string> lines;
    std::fflush(log_.get());
    std::rewind(log_.get());
    char line[4096];
    while (std::fgets(line, sizeof line, log_.get()) != nullptr) {
      if (std::string_view(line).find(event) != std::string_view::npos) lines.emplace_back(line);
    }
    std::fseek(log_.get(), 0, SEEK_END);
    return lines;
  }
  static std::uint64_t FieldOf(const std::string& line, std::string_view field) {
    const std::string key = Concat(" ", field, "=");
    const std::size_t at = line.find(key);
    EXPECT_NE(at, std::string::npos) << line;
    return at == std::string::npos ? 0 : std::stoull(line.substr(at + key.size()));
  }

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  FakeClock clock_;
  ManualScheduler scheduler_;
  const std::unique_ptr<std::FILE, Close> log_{std::tmpfile()};
  Logger logger_{LogOptions{.stream = log_.get()}};
  device::CpuDevice device_{kernels::BestImplementation()};
  std::unique_ptr<cache::Node> node_;
  std::optional<Pressure> pressure_;
  std::vector<std::shared_ptr<cache::SessionState>> sessions_;
  std::vector<std::shared_ptr<const cache::Model>> models_;
  std::atomic<int> pauses_{0};
  std::function<void()> on_pause_;
  bool gone_ = false;
  Clock::Duration at_work_ = kIdle;
  std::optional<Clock::Duration> patience_;
};

}  // namespace tessera::residency
