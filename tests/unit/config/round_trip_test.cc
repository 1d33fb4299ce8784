// For any Config, LoadConfig reads the output of --print-config back to the same Config.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/config/convert.h"
#include "daemon/config/limits.h"
#include "daemon/config/load.h"
#include "tests/fakes/seed.h"

namespace tessera::config {
namespace {

constexpr std::uint64_t kPoolMax = 512 * kGiB;
constexpr std::uint64_t kMemory = kPoolMax + 2049 * kGiB;  // with the other parts

absl::StatusOr<DeviceMemory> Memory(const DeviceChoice&) {
  return DeviceMemory{.bytes = kMemory, .source = "the test"};
}

class Generator {
 public:
  Generator(std::uint64_t seed, const std::string& token_file)
      : random_(seed), token_file_(token_file) {}

  Config Next() {
    Config config;
    config.listen.clear();
    for (std::uint64_t i = 0, count = In({1, 3}); i < count; ++i)
      config.listen.push_back(Listen(i));
    config.unix_socket_mode = 0600 | static_cast<std::uint32_t>(In({0, 0177}));
    for (std::uint32_t i = 0; Coin(); ++i) config.unix_peers.uids.push_back(1000 + i);
    for (std::uint32_t i = 0; Coin(); ++i) config.unix_peers.gids.push_back(i);
    config.allow_core_dumps = Coin();
    if (Coin()) config.kv_events = HostPort{.host = "127.0.0.1", .port = Port()};
    if (config.kv_events.has_value() && Coin()) {
      config.kv_events_replay = HostPort{.host = "::1", .port = Port()};
    }
    config.kv_events_encoding = static_cast<EventEncoding>(In({0, 1}));
    config.unused_system_calls = static_cast<UnusedCalls>(In({0, 4}));
    config.tcp_peer_limit = std::chrono::milliseconds(In(kTcpPeerLimitMs));
    config.admin_listen.unix_path = "/run/operators";  // else it is derived
    config.metrics_address = HostPort{.host = "::1", .port = Port()};
    if (Coin()) config.metrics_address.reset();
    config.device.kind = static_cast<DeviceChoice::Kind>(In({0, 2}));
    if (config.device.kind == DeviceChoice::Kind::kCuda) config.device.ordinal = Small({0, 1023});
    if (config.device.kind != DeviceChoice::Kind::kAuto && Coin()) {
      const bool is_cpu = config.device.kind == DeviceChoice::Kind::kCpu;
      DeviceUuid uuid = {.kind = is_cpu ? DeviceUuid::Kind::kCpu : DeviceUuid::Kind::kMig};
      for (std::byte& byte : uuid.bytes) byte = static_cast<std::byte>(In({0, 255}));
      config.device.ordinal = 0;
      config.device.uuid = uuid;
    }
    config.pool_extent_bytes = kExtentUnit * In({1, 64});
    config.pool_bytes = config.pool_extent_bytes * In({1, kPoolMax / config.pool_extent_bytes});
    config.staging_bytes = kExtentUnit * In({1, 1000});
    config.tail_ring_tiles = 2u << In({0, 5});
    config.tail_extent_bytes = kExtentUnit * In({1, 100});
    config.directory_extent_bytes = kExtentUnit * In({1, 100});
    config.max_sessions = Small(kMaxSessions);
    config.max_sequences_per_tenant = Small(kMaxSequencesPerTenant);
    config.max_models_per_tenant = Small(kMaxModelsPerTenant);
    config.max_prefixes_per_tenant = Small(kMaxPrefixesPerTenant);
    config.prefix_hash_seed = In({0, ~std::uint64_t{0}});
    config.max_message_bytes = In(kMaxMessageBytes);
    config.compactor_threads = Small(kCompactorThreads);
    for (std::uint32_t cpu = Small({0, 3}); Coin(); cpu += Small({1, 3})) {
      config.compactor_cpus.push_back(cpu);
    }
    for (std::uint32_t i = 0; Coin(); ++i) config.books.push_back(Concat("/books/", i));
    config.raw_copy_bytes = In(kRawCopyBytes);
    config.host_tier_bytes = In(kHostTierBytes);
    config.offload_idle = std::chrono::milliseconds(In(kOffloadIdleMs));
    config.pressure_high_percent = Small(kPressurePercent);
    config.pressure_low_percent = Small({1, config.pressure_high_percent});
    config.compactor_linger = std::chrono::milliseconds(In(kCompactorLingerMs));
    config.pin_limit = std::chrono::milliseconds(In(kPinLimitMs));
    config.drain_limit = std::chrono::milliseconds(In(kDrainLimitMs));
    config.slow_call = std::chrono::milliseconds(In(kSlowCallMs));
    config.log_level = static_cast<LogLevel>(In({0, 4}));
    config.log_format = static_cast<LogFormat>(In({0, 1}));
    config.tenants.clear();
    for (std::uint64_t i = 0, count = In({1, 4}); i < count; ++i) {
      config.tenants.push_back(NextTenant(i, config.pool_bytes, config.max_sessions));
    }
    return config;
  }

 private:
  std::uint64_t In(Range range) {
    return std::uniform_int_distribution<std::uint64_t>(range.min, range.max)(random_);
  }
  std::uint32_t Small(Range range) { return static_cast<std::uint32_t>(In(range)); }
  bool Coin() { return In({0, 1}) == 1; }
  std::uint16_t Port() { return static_cast<std::uint16_t>(In({10000, 65535})); }

  ListenAddress Listen(std::uint64_t i) {
    if (Coin()) return {.unix_path = Concat("/run/with \"quotes\"/", i, ".sock"), .tcp = {}};
    return {.unix_path = "", .tcp = {.host = Concat("host-", i), .port = Port()}};
  }

  Tenant NextTenant(std::uint64_t i, std::uint64_t pool_bytes, std::uint32_t max_sessions) {
    Tenant tenant{.name = Concat("tenant-", i)};
    tenant.hard_limit_bytes = In({1, pool_bytes});
    tenant.soft_limit_bytes = In({1, tenant.hard_limit_bytes});
    tenant.reserved_bytes = In({1, std::max<std::uint64_t>(tenant.hard_limit_bytes / 4, 1)});
    tenant.max_sessions = In({0, 1}) == 0 ? 0 : Small({1, max_sessions});
    if (i == 0) {
      tenant.token_file = token_file_;
      tenant.token = "from-the-file";
    } else if (i > 1) {  // at most one tenant may have none
      tenant.token = Concat("t", i);
      for (std::uint64_t k = In({0, 60}); k > 0; --k) {
        tenant.token += static_cast<char>(In({'!', '~'}));
      }
    }
    return tenant;
  }

  std::mt19937_64 random_;
  std::string token_file_;
};

class RoundTripTest : public ::testing::Test {
 protected:
  RoundTripTest() {
    std::string name = (std::filesystem::temp_directory_path() / "round_trip_XXXXXX").string();
    directory_ = mkdtemp(name.data());
    std::ofstream(directory_ / "token") << "from-the-file\n";
    std::filesystem::permissions(directory_ / "token", std::filesystem::perms(0600));
  }
  ~RoundTripTest() override { std::filesystem::remove_all(directory_); }

  absl::StatusOr<Invocation> Reload(const std::string& json) {
    const std::string path = (directory_ / "config.json").string();
    std::ofstream(path) << json;
    return LoadConfig(std::vector<std::string_view>{"--config", path, "--print-config"}, Memory);
  }

  std::filesystem::path directory_;
};

TEST_F(RoundTripTest, RandomConfigs) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Generator generator(seed, (directory_ / "token").string());
  for (int i = 0; i < 300; ++i) {
    const Config config = generator.Next();
    const std::string json = PrintConfig(config);
    const auto reloaded = Reload(json);
    ASSERT_TRUE(reloaded.ok()) << reloaded.status() << "\n" << json;
    ASSERT_EQ(reloaded->config, config) << json;
    ASSERT_EQ(*reloaded->print, json);
  }
}

// The effective configuration lists every field, including those with default values.
TEST_F(RoundTripTest, DefaultsArePrintedInFull) {
  const auto loaded = LoadConfig(std::vector<std::string_view>{"--print-config"}, Memory);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  for (const auto* descriptor :
       {tessera::v1::DaemonConfig::descriptor(), tessera::v1::TenantConfig::descriptor()}) {
    for (int i = 0; i < descriptor->field_count(); ++i) {
      EXPECT_THAT(*loaded->print,
                  testing::HasSubstr(Concat("\"", descriptor->field(i)->name(), "\":")));
    }
  }
  const auto reloaded = Reload(*loaded->print);
  ASSERT_TRUE(reloaded.ok()) << reloaded.status();
  EXPECT_EQ(reloaded->config, loaded->config);
}

}  // namespace
}  // namespace tessera::config
