#include "daemon/config/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "daemon/base/strings.h"

namespace tessera::config {
namespace {

using ::testing::HasSubstr;

TEST(HostPort, RoundTrips) {
  for (const char* text : {"127.0.0.1:9464", "localhost:0", "[::1]:65535", "node-7.example_x:1"}) {
    const auto address = ParseHostPort(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->ToString(), text);
  }
  EXPECT_EQ(ParseHostPort("[::1]:80")->host, "::1");
  EXPECT_EQ(ParseHostPort("a:80")->port, 80);
}

TEST(HostPort, RefusesByName) {
  for (const char* text : {"",        ":",        "9464",           "host",
                           "host:",   ":9464",    "host:65536",     "host:-1",
                           "host:+1", "host:1x",  "host: 1",        "::1:80",
                           "[::1]",   "[]:80",    "[::g]:80",       "[127.0.0.1]:80",
                           "ho st:1", "host/x:1", "http://host:80", "host:99999999999999999999"}) {
    const auto address = ParseHostPort(text);
    ASSERT_FALSE(address.ok()) << text << " -> " << address->ToString();
    EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(address.status().message()), HasSubstr(Concat("\"", text, "\"")));
  }
}

TEST(HostPort, KnowsLoopback) {
  for (const char* text : {"localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1"}) {
    EXPECT_TRUE(ParseHostPort(text)->IsLoopback()) << text;
  }
  for (const char* text : {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "example.org:1"}) {
    EXPECT_FALSE(ParseHostPort(text)->IsLoopback()) << text;
  }
}

TEST(ListenAddress, TakesUnixAndTcp) {
  EXPECT_EQ(ParseListenAddress("unix:/run/x.sock")->unix_path, "/run/x.sock");
  EXPECT_EQ(ParseListenAddress("unix:///run/x.sock")->ToString(), "unix:/run/x.sock");
  // Any number of slashes: the printed form parses to the same path.
  EXPECT_EQ(ParseListenAddress("unix:////run/x.sock")->ToString(), "unix:/run/x.sock");
  EXPECT_EQ(ParseListenAddress("unix:////////x.sock")->ToString(), "unix:/x.sock");
  EXPECT_EQ(ParseListenAddress("unix:x.sock")->unix_path, "x.sock");
  EXPECT_FALSE(ParseListenAddress("[::1]:50051")->is_unix());
  EXPECT_EQ(ParseListenAddress("[::1]:50051")->ToString(), "[::1]:50051");
}

TEST(ListenAddress, UnixPathsHaveTheSystemsLimit) {
  EXPECT_TRUE(ParseListenAddress(Concat("unix:", std::string(kMaxUnixPath, 'x'))).ok());
  const auto too_long = ParseListenAddress(Concat("unix:", std::string(kMaxUnixPath + 1, 'x')));
  ASSERT_FALSE(too_long.ok());
  EXPECT_THAT(std::string(too_long.status().message()),
              HasSubstr("has 102 bytes; the limit is 101"));
}

TEST(ListenAddress, UnixPathsMayContainTheUuidOfTheDevice) {
  const DeviceUuid uuid = ParseDeviceUuid("GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687").value();
  auto address = ParseListenAddress("unix:/run/{uuid}/tessera-{uuid}.sock");
  ASSERT_TRUE(address.ok()) << address.status();
  EXPECT_TRUE(address->needs_uuid());
  EXPECT_EQ(address->ToString(), "unix:/run/{uuid}/tessera-{uuid}.sock");
  address->SetUuid(uuid);
  EXPECT_FALSE(address->needs_uuid());
  EXPECT_EQ(address->ToString(),
            Concat("unix:/run/", uuid.ToString(), "/tessera-", uuid.ToString(), ".sock"));
  EXPECT_FALSE(ParseListenAddress("unix:/run/tesserad.sock")->needs_uuid());
  EXPECT_FALSE(ParseListenAddress("10.0.0.1:1")->needs_uuid());
}

TEST(ListenAddress, TheOperatorsSocketMayHaveItsSuffix) {
  EXPECT_EQ(ParseAdminAddress("unix:/run/x.sock.admin")->ToString(), "unix:/run/x.sock.admin");
  EXPECT_EQ(ParseAdminAddress("unix:///run/x")->ToString(), "unix:/run/x");
  for (const char* text :
       {"127.0.0.1:1", "unix:/run/x.lock", "unix:/run/x.fd", "unix:", "/run/x"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseAdminAddress(text).status())) << text;
  }
  EXPECT_THAT(std::string(ParseListenAddress("unix:/run/x.sock.admin").status().message()),
              HasSubstr("ends in .admin is reserved"));
}

TEST(ListenAddress, TheLimitHoldsForTheExpandedPath) {
  const std::string most(kMaxUnixPath - kDeviceUuidLength, 'x');
  EXPECT_TRUE(ParseListenAddress(Concat("unix:", most, "{uuid}")).ok());
  const auto too_long = ParseListenAddress(Concat("unix:x", most, "{uuid}"));
  ASSERT_FALSE(too_long.ok());
  EXPECT_THAT(std::string(too_long.status().message()),
              HasSubstr("has 102 bytes; the limit is 101"));
}

TEST(ListenAddress, OtherPlaceholdersAreRefused) {
  for (const char* text : {"unix:/run/{uid}.sock", "unix:/run/{UUID}", "unix:/{", "unix:{uuid}}"}) {
    const auto address = ParseListenAddress(text);
    ASSERT_FALSE(address.ok()) << text;
    EXPECT_THAT(std::string(address.status().message()), HasSubstr("placeholder is {uuid}"));
  }
}

TEST(ListenAddress, UnixPathsAreNotWhatStandsBesideOthers) {
  for (const char* text : {"unix:q.fd", "unix:/run/q.lock"}) {
    const auto beside = ParseListenAddress(text);
    ASSERT_FALSE(beside.ok()) << text;
    EXPECT_THAT(std::string(beside.status().message()), HasSubstr("next to another socket"));
  }
}

TEST(ListenAddress, UnixPathsAreWhatGrpcTakesThemFor) {
  for (const char* text : {"unix:/run/a%41", "unix:100%"}) {
    const auto encoded = ParseListenAddress(text);
    ASSERT_FALSE(encoded.ok()) << text;
    EXPECT_THAT(std::string(encoded.status().message()), HasSubstr("%"));
  }
}

TEST(ListenAddress, RefusesOtherSchemes) {
  for (const std::string text :
       {"", "unix:", "unix://", "/run/x.sock", "unix-abstract:x", "tcp://x", "x"}) {
    EXPECT_FALSE(ParseListenAddress(text).ok()) << text;
  }
  EXPECT_FALSE(ParseListenAddress(std::string_view("unix:/a\0b", 9)).ok());
}

}  // namespace
}  // namespace tessera::config
