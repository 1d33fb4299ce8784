#include "daemon/config/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>

#include "daemon/base/strings.h"
#include "daemon/config/limits.h"

namespace tessera::config {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const DeviceMemory kEightGiB = {.bytes = 8 * kGiB, .source = "the test"};

Config Resolved() {
  Config config;
  EXPECT_TRUE(ResolveDefaults(kEightGiB, config).ok());
  return config;
}

std::string ErrorAfter(const std::function<void(Config&)>& change) {
  Config config = Resolved();
  change(config);
  const absl::Status status = Validate(config, kEightGiB);
  if (status.ok()) return "(no error)";
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(ResolveDefaults, ThePoolIsHalfOfTheMemoryInWholeExtents) {
  Config config;
  ASSERT_TRUE(ResolveDefaults({.bytes = 5 * kGiB + 7, .source = ""}, config).ok());
  EXPECT_EQ(config.pool_bytes, 40 * 64 * kMiB);
  EXPECT_EQ(config.tenants.at(0).hard_limit_bytes, config.pool_bytes);
  EXPECT_EQ(config.tenants.at(0).soft_limit_bytes, config.pool_bytes);
}

TEST(ResolveDefaults, GivenValuesStay) {
  Config config;
  config.pool_bytes = kGiB;
  config.tenants = {{.name = "a", .hard_limit_bytes = 5 * kMiB},
                    {.name = "b", .token = "t", .soft_limit_bytes = 3 * kMiB}};
  ASSERT_TRUE(ResolveDefaults(kEightGiB, config).ok());
  EXPECT_EQ(config.pool_bytes, kGiB);
  EXPECT_EQ(config.tenants[0].soft_limit_bytes, 5 * kMiB);
  EXPECT_EQ(config.tenants[1].soft_limit_bytes, 3 * kMiB);
  EXPECT_EQ(config.tenants[1].hard_limit_bytes, kGiB);
}

TEST(ResolveDefaults, TooLittleMemoryForOneExtentSaysSo) {
  Config config;
  const absl::Status status = ResolveDefaults({.bytes = 100 * kMiB, .source = "x"}, config);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("pool_bytes"), HasSubstr("100.0 MiB"), HasSubstr("64.0 MiB")));
}

TEST(Validate, DefaultsAreValid) { EXPECT_TRUE(Validate(Resolved(), kEightGiB).ok()); }

TEST(Validate, APoolLargerThanTheMemoryNamesBoth) {
  EXPECT_THAT(ErrorAfter([](Config& config) { config.pool_bytes = 16 * kGiB; }),
              AllOf(HasSubstr("pool_bytes: 17179869184 (16.0 GiB)"),
                    HasSubstr("8589934592 (8.0 GiB) according to the test")));
}

TEST(Validate, AllOfTheMemoryIsAllowed) {
  const auto with_pool = [](std::uint64_t pool_bytes) {
    return ErrorAfter([pool_bytes](Config& config) {
      config.pool_bytes = pool_bytes;
      config.host_tier_bytes = kGiB / 2;
      config.raw_copy_bytes = kGiB / 2;
    });
  };
  EXPECT_EQ(with_pool(6 * kGiB + 512 * kMiB), "(no error)");
  EXPECT_EQ(with_pool(6 * kGiB + 576 * kMiB),
            "pool_bytes: does not fit into the memory with the other parts: pool_bytes 6.6 GiB + "
            "host_tier_bytes 512.0 MiB + raw_copy_bytes 512.0 MiB + messages 256.0 MiB + heap "
            "256.0 MiB = 8.1 GiB of 8.0 GiB according to the test; lower one of them, or leave it "
            "out");
}

TEST(Validate, ThePoolIsWholeExtents) {
  EXPECT_THAT(ErrorAfter([](Config& config) { config.pool_bytes = kGiB + 1; }),
              AllOf(HasSubstr("pool_bytes: 1073741825"), HasSubstr("pool_extent_bytes 67108864"),
                    HasSubstr("the next lower multiple is 1073741824")));
  EXPECT_THAT(ErrorAfter([](Config& config) { config.pool_bytes = 32 * kMiB; }),
              HasSubstr("less than one extent"));
}

struct RangeRow {
  const char* field;
  Range range;
  std::function<void(Config&, std::uint64_t)> set;
};

template <typename T>
std::function<void(Config&, std::uint64_t)> Setter(T Config::*member) {
  return [member](Config& config, std::uint64_t value) { config.*member = T(value); };
}

// Both ends of every range are allowed. One beyond is refused with field, value and range.
TEST(Validate, EveryRangeHoldsExactly) {
  const RangeRow rows[] = {
      {"pool_extent_bytes", kPoolExtentBytes, Setter(&Config::pool_extent_bytes)},
      {"staging_bytes", kStagingBytes, Setter(&Config::staging_bytes)},
      {"tail_ring_tiles", kTailRingTiles, Setter(&Config::tail_ring_tiles)},
      {"tail_extent_bytes", kTailExtentBytes, Setter(&Config::tail_extent_bytes)},
      {"directory_extent_bytes", kDirectoryExtentBytes, Setter(&Config::directory_extent_bytes)},
      {"max_sessions", kMaxSessions, Setter(&Config::max_sessions)},
      {"max_sequences_per_tenant", kMaxSequencesPerTenant,
       Setter(&Config::max_sequences_per_tenant)},
      {"max_models_per_tenant", kMaxModelsPerTenant, Setter(&Config::max_models_per_tenant)},
      {"max_prefixes_per_tenant", kMaxPrefixesPerTenant, Setter(&Config::max_prefixes_per_tenant)},
      {"max_message_bytes", kMaxMessageBytes, Setter(&Config::max_message_bytes)},
      {"compactor_threads", kCompactorThreads, Setter(&Config::compactor_threads)},
      {"raw_copy_bytes", kRawCopyBytes, Setter(&Config::raw_copy_bytes)},
      {"host_tier_bytes", kHostTierBytes, Setter(&Config::host_tier_bytes)},
      {"offload_idle_ms", kOffloadIdleMs, Setter(&Config::offload_idle)},
      {"pressure_high_percent", kPressurePercent,
       [](Config& config, std::uint64_t value) {
         config.pressure_high_percent = static_cast<std::uint32_t>(value);
         config.pressure_low_percent = 1;
       }},
      {"pressure_low_percent", kPressurePercent,
       [](Config& config, std::uint64_t value) {
         config.pressure_high_percent = 100;
         config.pressure_low_percent = static_cast<std::uint32_t>(value);
       }},
      {"compactor_linger_ms", kCompactorLingerMs, Setter(&Config::compactor_linger)},
      {"pin_limit_ms", kPinLimitMs, Setter(&Config::pin_limit)},
      {"drain_limit_ms", kDrainLimitMs, Setter(&Config::drain_limit)},
      {"slow_call_ms", kSlowCallMs, Setter(&Config::slow_call)},
      {"tcp_peer_limit_ms", kTcpPeerLimitMs, Setter(&Config::tcp_peer_limit)},
  };
  const DeviceMemory plenty = {.bytes = 4 * kTiB, .source = "the test"};
  for (const RangeRow& row : rows) {
    SCOPED_TRACE(row.field);
    for (const std::uint64_t value : {row.range.min, row.range.max}) {
      Config config;
      config.pool_bytes = 64 * kGiB;  // a multiple of every extent size tried
      row.set(config, value);
      ASSERT_TRUE(ResolveDefaults(plenty, config).ok());
      EXPECT_TRUE(Validate(config, plenty).ok()) << Validate(config, plenty);
    }
    for (const std::uint64_t value : {row.range.min - 1, row.range.max + 1}) {
      if (row.range.min == 0 && value == row.range.min - 1) continue;
      EXPECT_THAT(ErrorAfter([&](Config& config) { row.set(config, value); }),
                  HasSubstr(Concat(row.field, ": ", value, " is not from ", row.range.min, " to ",
                                   row.range.max)));
    }
  }
}

TEST(Validate, ExtentsAreMultiplesOfTwoMebibytes) {
  for (const auto member : {&Config::pool_extent_bytes, &Config::staging_bytes,
                            &Config::tail_extent_bytes, &Config::directory_extent_bytes}) {
    EXPECT_THAT(ErrorAfter([&](Config& config) { config.*member = 3 * kMiB; }),
                AllOf(HasSubstr("3145728 (3.0 MiB) is not a multiple of 2097152 (2.0 MiB)"),
                      HasSubstr("the next lower multiple is 2097152")));
  }
}

TEST(Validate, TheRingIsAPowerOfTwo) {
  for (const std::uint32_t tiles : {3u, 6u, 63u}) {
    EXPECT_THAT(ErrorAfter([&](Config& config) { config.tail_ring_tiles = tiles; }),
                HasSubstr(Concat("tail_ring_tiles: ", tiles, " is not a power of two")));
  }
}

TEST(Validate, TheLowMarkIsTheLowerOne) {
  EXPECT_THAT(ErrorAfter([](Config& config) {
                config.pressure_high_percent = 70;
                config.pressure_low_percent = 71;
              }),
              HasSubstr("pressure_low_percent: 71 is above pressure_high_percent, 70"));
  EXPECT_EQ(ErrorAfter([](Config& config) {
              config.pressure_high_percent = config.pressure_low_percent = 70;
            }),
            "(no error)");
}

TEST(Validate, SocketModesKeepTheOwnerIn) {
  for (const std::uint32_t mode : {0u, 0060u, 0477u, 01777u}) {
    EXPECT_THAT(ErrorAfter([&](Config& config) { config.unix_socket_mode = mode; }),
                HasSubstr("unix_socket_mode"));
  }
}

TEST(Validate, AddressesAreThereAndDiffer) {
  const ListenAddress tcp = {.unix_path = "", .tcp = {.host = "localhost", .port = 9000}};
  const ListenAddress any = {.unix_path = "", .tcp = {.host = "localhost", .port = 0}};
  EXPECT_THAT(ErrorAfter([](Config& config) { config.listen.clear(); }), HasSubstr("listen: "));
  EXPECT_THAT(ErrorAfter([&](Config& config) {
                config.listen = {tcp, tcp};
              }),
              HasSubstr("\"localhost:9000\" is listed twice"));
  EXPECT_THAT(ErrorAfter([&](Config& config) {
                config.listen = {tcp};
                config.metrics_address = tcp.tcp;
              }),
              HasSubstr("metrics_address: \"localhost:9000\""));
  EXPECT_EQ(ErrorAfter([&](Config& config) {
              config.listen = {any, any};
              config.metrics_address = any.tcp;
            }),
            "(no error)");
}

TEST(Validate, TenantsHaveNamesOfTheirOwn) {
  const auto error = [](std::string name) {
    return ErrorAfter([&](Config& config) { config.tenants.at(0).name = name; });
  };
  for (const char* good : {"a", "0", "team-a_b.c", "a23456789012345678901234567890"}) {
    EXPECT_EQ(error(good), "(no error)") << good;
  }
  for (const std::string bad : {"", "A", "-a", ".a", "a b", "a\n", "\xc3\xa4", "a\"b"}) {
    EXPECT_THAT(error(bad), HasSubstr("tenants[0].name: ")) << bad;
  }
  EXPECT_EQ(error(std::string(kMaxTenantName, 'a')), "(no error)");
  EXPECT_THAT(error(std::string(kMaxTenantName + 1, 'a')), HasSubstr("tenants[0].name: "));
  EXPECT_THAT(ErrorAfter([](Config& config) {
                config.tenants = {{.name = "a", .token = "1"}, {.name = "a", .token = "2"}};
              }),
              HasSubstr("tenants[1].name: \"a\" is also the name of tenants[0]"));
}

TEST(Validate, ThereAreTenantsButNotTooMany) {
  EXPECT_THAT(ErrorAfter([](Config& config) { config.tenants.clear(); }),
              HasSubstr("number of tenants: 0 is not from 1 to 256"));
}

TEST(Validate, TokensDifferAndAreNeverQuoted) {
  const auto error = [](const std::string& token) {
    return ErrorAfter([&](Config& config) {
      config.tenants = {{.name = "a", .token = token}, {.name = "b", .token = token}};
    });
  };
  EXPECT_THAT(error(""), HasSubstr("\"a\" and \"b\" both have no token"));
  EXPECT_THAT(error("hunter2"),
              AllOf(HasSubstr("\"a\" and \"b\" have the same token"), Not(HasSubstr("hunter2"))));
  for (const std::string bad : {"hunter 2", "hunter\n2", "hunt\xc3\xa4r"}) {
    EXPECT_THAT(error(bad), AllOf(HasSubstr("tenants[0].token: "), Not(HasSubstr("hunt"))));
  }
  EXPECT_THAT(error(std::string(kMaxToken + 1, 'z')),
              AllOf(HasSubstr("has 257 characters; the limit is 256"), Not(HasSubstr("zz"))));
}

TEST(Validate, TenantLimitsFitIntoEachOther) {
  EXPECT_THAT(ErrorAfter([](Config& config) { config.tenants[0].hard_limit_bytes = 5 * kGiB; }),
              AllOf(HasSubstr("tenants[0].hard_limit_bytes: 5368709120 (5.0 GiB) of tenant \"defa"),
                    HasSubstr("pool_bytes, 4294967296 (4.0 GiB)")));
  EXPECT_THAT(ErrorAfter([](Config& config) { config.tenants[0].hard_limit_bytes = kGiB; }),
              HasSubstr("tenants[0].soft_limit_bytes: "));
  EXPECT_THAT(ErrorAfter([](Config& config) {
                config.tenants[0].reserved_bytes = 2 * kGiB;
                config.tenants[0].soft_limit_bytes = config.tenants[0].hard_limit_bytes = kGiB;
              }),
              AllOf(HasSubstr("tenants[0].reserved_bytes: 2147483648 (2.0 GiB)"),
                    HasSubstr("hard_limit_bytes, 1073741824 (1.0 GiB)")));
  EXPECT_THAT(ErrorAfter([](Config& config) { config.tenants[0].max_sessions = 65; }),
              HasSubstr("tenants[0].max_sessions: 65 of tenant \"default\" is more than "
                        "max_sessions of the daemon, 64"));
}

TEST(Validate, ReservesFitIntoThePool) {
  const auto with = [](std::uint64_t first, std::uint64_t second) {
    return ErrorAfter([=](Config& config) {
      Tenant tenant = config.tenants[0];
      tenant.reserved_bytes = first;
      config.tenants = {tenant, tenant};
      config.tenants[1].name = "second";
      config.tenants[1].token = "x";
      config.tenants[1].reserved_bytes = second;
    });
  };
  EXPECT_EQ(with(kGiB, 3 * kGiB), "(no error)");
  EXPECT_THAT(with(kGiB + 1, 3 * kGiB),
              AllOf(HasSubstr("tenants[1].reserved_bytes: 3221225472 (3.0 GiB) of tenant "
                              "\"second\""),
                    HasSubstr("are 4294967297 (4.0 GiB), more than pool_bytes, 4294967296")));
}

TEST(ResolveDefaults, EachTenantIsGuaranteedHalfOfAnEqualShare) {
  Config config;
  config.tenants = {{.name = "a"},
                    {.name = "b", .hard_limit_bytes = 100 * kMiB},
                    {.name = "c", .reserved_bytes = kMiB}};
  ASSERT_TRUE(ResolveDefaults(kEightGiB, config).ok());
  EXPECT_EQ(config.tenants[0].reserved_bytes, 4 * kGiB / 6);
  EXPECT_EQ(config.tenants[1].reserved_bytes, 100 * kMiB);
  EXPECT_EQ(config.tenants[2].reserved_bytes, kMiB);
  // Of a small pool, a part must hold an extent and a directory.
  Config small;
  small.tenants = {{.name = "a"}, {.name = "b"}, {.name = "c"}};
  ASSERT_TRUE(ResolveDefaults({.bytes = 512 * kMiB, .source = ""}, small).ok());
  EXPECT_EQ(small.pool_bytes, 256 * kMiB);
  EXPECT_EQ(small.tenants[0].reserved_bytes, 68 * kMiB);
}

TEST(Validate, TlsFilesComeTogether) {
  EXPECT_THAT(ErrorAfter([](Config& config) { config.tls_certificate_file = "/c"; }),
              AllOf(HasSubstr("tls_key_file"), HasSubstr("\"/c\"")));
  EXPECT_THAT(ErrorAfter([](Config& config) { config.tls_key_file = "/k"; }),
              AllOf(HasSubstr("tls_certificate_file"), HasSubstr("\"/k\"")));
  EXPECT_THAT(ErrorAfter([](Config& config) { config.tls_client_ca_file = "/a"; }),
              HasSubstr("tls_client_ca_file"));
}

TEST(Warnings, NameTheOpenDoor) {
  Config config = Resolved();
  EXPECT_TRUE(Warnings(config).empty());
  config.listen.push_back({.unix_path = "", .tcp = {.host = "127.0.0.1", .port = 1}});
  EXPECT_TRUE(Warnings(config).empty());
  config.listen.push_back({.unix_path = "", .tcp = {.host = "0.0.0.0", .port = 1}});
  EXPECT_THAT(Warnings(config), testing::ElementsAre(HasSubstr("\"default\" has no token"),
                                                     HasSubstr("without TLS")));
  config.tenants[0].token = "t";
  config.tls_certificate_file = "c";
  config.tls_key_file = "k";
  EXPECT_TRUE(Warnings(config).empty());
  config.tls_client_ca_file = "a";
  EXPECT_TRUE(Warnings(config).empty());
  config.listen = {config.listen.front()};
  EXPECT_THAT(Warnings(config), testing::ElementsAre(HasSubstr("no TCP address")));
  config.tls_certificate_file.clear();
  config.unix_socket_mode = 0666;
  EXPECT_THAT(Warnings(config), testing::ElementsAre(HasSubstr("unix_socket_mode")));
  config.unix_peers.uids = {1000};
  EXPECT_TRUE(Warnings(config).empty()) << "the kernel says who comes";
}

TEST(Warnings, SayHowMuchOfASmallPoolHoldsNothing) {
  Config config;
  config.pool_bytes = 128 << 20;
  EXPECT_EQ(UsablePoolBytes(config), 64u << 20) << "one extent beside the directory";
  EXPECT_THAT(Warnings(config), testing::ElementsAre(testing::AllOf(
                                    HasSubstr("of 128.0 MiB at most 64.0 MiB can hold KV"),
                                    HasSubstr("lower pool_extent_bytes"))));
  config.pool_extent_bytes = 16 << 20;
  EXPECT_EQ(UsablePoolBytes(config), 112u << 20);
  EXPECT_TRUE(Warnings(config).empty());
  config.pool_bytes = 16 << 20;
  EXPECT_EQ(UsablePoolBytes(config), 0u);
  EXPECT_THAT(Warnings(config), testing::ElementsAre(HasSubstr("at most 0 B can hold KV")));
}

}  // namespace
}  // namespace tessera::config
