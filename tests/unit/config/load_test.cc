#include "daemon/config/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "daemon/config/limits.h"

namespace tessera::config {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

namespace fs = std::filesystem;

absl::StatusOr<DeviceMemory> EightGiB(const DeviceChoice&) {
  return DeviceMemory{.bytes = 8 * kGiB, .source = "the test"};
}

class LoadConfigTest : public ::testing::Test {
 protected:
  LoadConfigTest() {
    std::string name = (fs::temp_directory_path() / "load_config_XXXXXX").string();
    directory_ = mkdtemp(name.data());
  }
  ~LoadConfigTest() override { fs::remove_all(directory_); }

  std::string Write(const std::string& name, std::string_view text) {
    std::ofstream(directory_ / name, std::ios::binary) << text;
    std::filesystem::permissions(directory_ / name, std::filesystem::perms(0600));
    return (directory_ / name).string();
  }

  absl::StatusOr<Invocation> Load(std::vector<std::string> args) {
    const std::vector<std::string_view> views(args.begin(), args.end());
    return LoadConfig(views, EightGiB);
  }

  absl::StatusOr<Invocation> LoadJson(std::string_view json, std::vector<std::string> args = {}) {
    args.insert(args.begin(), Concat("--config=", Write("config.json", json)));
    return Load(args);
  }

  std::string ErrorOfJson(std::string_view json) {
    const auto loaded = LoadJson(json);
    return loaded.ok() ? "(no error)" : std::string(loaded.status().message());
  }

  fs::path directory_;
};

TEST_F(LoadConfigTest, WhatIsNoRegularFileIsRefusedWithoutWaiting) {
  const std::string pipe = (directory_ / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path : {pipe, directory_.string()}) {
    const auto loaded = Load({"--config=" + path});
    ASSERT_FALSE(loaded.ok());
    EXPECT_THAT(std::string(loaded.status().message()),
                HasSubstr(Concat("\"", path, "\" is not a regular file")));
  }
}

TEST_F(LoadConfigTest, WithoutArgumentsGivesTheDefaults) {
  const auto loaded = Load({});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  Config expected;
  expected.admin_listen.unix_path = "/run/tessera/tesserad.sock.admin";
  expected.pool_bytes = 4 * kGiB;
  expected.host_tier_bytes = 1717986918;
  expected.raw_copy_bytes = 515396075;
  expected.tenants[0].soft_limit_bytes = 4 * kGiB;
  expected.tenants[0].hard_limit_bytes = 4 * kGiB;
  expected.tenants[0].reserved_bytes = 2 * kGiB;
  EXPECT_EQ(loaded->config, expected);
  EXPECT_FALSE(loaded->print.has_value());
}

TEST_F(LoadConfigTest, FlagsGoOverTheFile) {
  const auto loaded = LoadJson(
      R"({"device": "cpu", "pool_bytes": 1073741824, "maxSessions": 7, "metrics_address": "",
          "listen": ["unix:/file"], "tenants": [{"name": "a", "token": "t"}]})",
      {"--pool-bytes=512MiB", "--listen=unix:/flag", "--metrics=localhost:1"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const Config& config = loaded->config;
  EXPECT_EQ(config.device.ToString(), "cpu");
  EXPECT_EQ(config.pool_bytes, 512 * kMiB);
  EXPECT_EQ(config.max_sessions, 7u);
  EXPECT_EQ(config.metrics_address->ToString(), "localhost:1");
  ASSERT_EQ(config.listen.size(), 1u);
  EXPECT_EQ(config.listen[0].ToString(), "unix:/flag");
  ASSERT_EQ(config.tenants.size(), 1u);
  EXPECT_EQ(config.tenants[0].token, "t");
}

TEST_F(LoadConfigTest, NoMetricsAddressMeansNoMetrics) {
  EXPECT_FALSE(Load({"--metrics="})->config.metrics_address.has_value());
}

TEST_F(LoadConfigTest, JsonIsStrictAndErrorsNameTheField) {
  EXPECT_THAT(ErrorOfJson(R"({"pool_bites": 1})"),
              AllOf(HasSubstr("config.json"), HasSubstr("pool_bites")));
  EXPECT_THAT(ErrorOfJson(R"({"tenants": [{"name": "a", "quota": 1}]})"), HasSubstr("quota"));
  EXPECT_THAT(ErrorOfJson(R"({"max_sessions": "many"})"), HasSubstr("max_sessions"));
  EXPECT_THAT(ErrorOfJson(R"({"max_sessions": -1})"), HasSubstr("max_sessions"));
  EXPECT_THAT(ErrorOfJson(R"({"device": 3})"), HasSubstr("device"));
  EXPECT_THAT(ErrorOfJson(R"({"listen": [{"path": "/x"}]})"), HasSubstr("listen"));
  for (const char* broken : {"", "{", "[]", "{} x", "{\"device\": \"cpu\",,}", "null", "\xff"}) {
    EXPECT_FALSE(LoadJson(broken).ok()) << broken;
  }
}

TEST_F(LoadConfigTest, ErrorsNameThePlaceInTheFile) {
  const std::string file = (directory_ / "config.json").string();
  // Found while reading, while parsing texts, and while checking limits.
  EXPECT_THAT(ErrorOfJson("{\n \"pool_byte\": 1}"),
              HasSubstr(Concat(file, ":2:2: \"pool_byte\" is not a field; did you mean")));
  EXPECT_THAT(ErrorOfJson("{\n \"device\": \"gpu\"}"),
              HasSubstr(Concat(file, ":2:12: device: \"gpu\" is not")));
  EXPECT_THAT(ErrorOfJson("{\n \"max_sessions\": 0}"),
              HasSubstr(Concat(file, ":2:18: max_sessions: 0 is not from 1")));
  EXPECT_THAT(ErrorOfJson("{\"tenants\": [\n {\"name\": \"a\"},\n {\"name\": \"B\"}]}"),
              HasSubstr(Concat(file, ":3:11: tenants[1].name: \"B\" is not a tenant name")));
  EXPECT_THAT(ErrorOfJson("{\"tenants\": [{\"name\": \"a\",\n\"token_file\": \"/no\"}]}"),
              HasSubstr(Concat(file, ":2:15: tenants[0].token_file of tenant \"a\"")));
  // A value that a flag replaces has no place in the file.
  const auto loaded = LoadJson("{\"max_sessions\": 1}", {"--max-sessions=0"});
  EXPECT_THAT(std::string(loaded.status().message()), StartsWith("max_sessions: 0 is not from 1"));
}

TEST_F(LoadConfigTest, TextsAreParsedAndErrorsNameTheField) {
  EXPECT_THAT(ErrorOfJson(R"({"listen": ["nowhere"]})"), HasSubstr("listen: \"nowhere\""));
  EXPECT_THAT(ErrorOfJson(R"({"metrics_address": "x:y"})"), HasSubstr("metrics_address: \"x:y\""));
  EXPECT_THAT(ErrorOfJson(R"({"device": "gpu"})"), HasSubstr("device: \"gpu\""));
  EXPECT_THAT(ErrorOfJson(R"({"device": "cuda:x"})"), HasSubstr("device: \"cuda:x\""));
  EXPECT_THAT(ErrorOfJson(R"({"log_level": "loud"})"), HasSubstr("log_level: \"loud\""));
  EXPECT_THAT(ErrorOfJson(R"({"log_format": "xml"})"), HasSubstr("log_format: \"xml\""));
  for (const char* mode : {"", "0688", "rw", "-660", "0o660", "660 ", "777777"}) {
    EXPECT_THAT(ErrorOfJson(Concat(R"({"unix_socket_mode": ")", mode, "\"}")),
                HasSubstr("unix_socket_mode: "))
        << mode;
  }
  EXPECT_EQ(Load({"--unix-socket-mode=600"})->config.unix_socket_mode, 0600u);
  EXPECT_THAT(ErrorOfJson(R"({"unix_peers": "uid:1000,root"})"), HasSubstr("unix_peers: \"root\""));
  EXPECT_EQ(Load({"--unix-peers=uid:1000,gid:27"})->config.unix_peers.ToString(),
            "uid:1000,gid:27");
}

TEST_F(LoadConfigTest, FilesThatCannotBeReadAreNamed) {
  const std::string missing = (directory_ / "missing.json").string();
  const auto loaded = Load({Concat("--config=", missing)});
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(loaded.status().message()),
              AllOf(HasSubstr("--config"), HasSubstr(missing)));
  EXPECT_FALSE(Load({Concat("--config=", directory_.string())}).ok()) << "a directory";
  EXPECT_THAT(ErrorOfJson(std::string(kMaxConfigFile + 1, ' ')),
              HasSubstr("more than 1048576 bytes"));
}

TEST_F(LoadConfigTest, TokensMayComeFromFiles) {
  const std::string file = Write("token", "  s3cret\n");
  const std::string json = Concat(R"({"tenants": [{"name": "a", "token_file": ")", file, "\"}]}");
  const auto loaded = LoadJson(json, {"--print-config"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->config.tenants.at(0).token, "s3cret");
  EXPECT_THAT(*loaded->print, AllOf(HasSubstr(file), Not(HasSubstr("s3cret"))));
}

TEST_F(LoadConfigTest, TokenFilesThatGiveNoTokenAreRefused) {
  const auto error = [this](const std::string& file, std::string_view token) {
    return ErrorOfJson(Concat(R"({"tenants": [{"name": "a", "token_file": ")", file,
                              R"(", "token": ")", token, "\"}]}"));
  };
  EXPECT_THAT(error(Write("empty", " \n"), ""), HasSubstr("token_file of tenant \"a\""));
  EXPECT_THAT(error((directory_ / "none").string(), ""), HasSubstr("token_file of tenant \"a\""));
  EXPECT_THAT(error(Write("token", "x"), "y"), HasSubstr("token is set too"));
  EXPECT_THAT(error(Write("long", std::string(5000, 'x')), ""), HasSubstr("limit"));
}

TEST_F(LoadConfigTest, AMissingDeviceIsNamed) {
  const auto loaded = LoadConfig(std::vector<std::string_view>{"--device=cuda:3"});
  EXPECT_EQ(loaded.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(loaded.status().message()), HasSubstr("\"cuda:3\""));
}

TEST_F(LoadConfigTest, AddressesGetTheUuidOfTheDevice) {
  const std::string uuid = "GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687";
  const std::string cpu = "CPU-00000000-0000-0000-0000-000000000001";
  const auto machine = [&](const DeviceChoice& choice) -> absl::StatusOr<DeviceMemory> {
    if (choice.kind == DeviceChoice::Kind::kCpu) return HostMemoryOf(choice);
    return DeviceMemory{
        .bytes = 8 * kGiB, .source = "the test", .uuid = ParseDeviceUuid(uuid).value()};
  };
  for (const auto& [device, expected] :
       {std::pair(std::string("cuda:0"), uuid), std::pair(uuid, uuid), std::pair(cpu, cpu)}) {
    const std::string flag = "--device=" + device;
    const std::string_view args[] = {flag, "--listen=unix:/run/t/{uuid}.sock,10.0.0.1:7400"};
    const auto loaded = LoadConfig(args, machine);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->config.device.ToString(), device);
    ASSERT_EQ(loaded->config.listen.size(), 2u);
    EXPECT_EQ(loaded->config.listen[0].ToString(), "unix:/run/t/" + expected + ".sock");
  }
  const std::string_view twice[] = {
      "--listen=unix:/run/t/{uuid}",
      "--listen=unix:/run/t/GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687"};
  EXPECT_THAT(std::string(LoadConfig(twice, machine).status().message()),
              HasSubstr("is listed twice"));
}

TEST_F(LoadConfigTest, AnAddressWithUuidNeedsADeviceWithOne) {
  for (const char* device : {"cpu", "auto"}) {
    const auto loaded = Load({Concat("--device=", device), "--listen=unix:/run/t/{uuid}.sock"});
    ASSERT_TRUE(absl::IsInvalidArgument(loaded.status())) << device;
    EXPECT_THAT(std::string(loaded.status().message()),
                AllOf(HasSubstr("\"unix:/run/t/{uuid}.sock\": the CPU has no UUID"),
                      HasSubstr("--device=CPU-00000000-0000-0000-0000-000000000001")));
  }
  EXPECT_THAT(std::string(Load({"--listen=unix:/{uuid}"}).status().message()),
              HasSubstr("--device=auto found no usable GPU"));
}

TEST_F(LoadConfigTest, SeveralDevicesInOneDaemonAreRefusedWithTheWayToGo) {
  for (const char* text : {"cuda:all", "cuda", "all"}) {
    const auto loaded = Load({Concat("--device=", text)});
    ASSERT_TRUE(absl::IsInvalidArgument(loaded.status())) << text;
    EXPECT_THAT(std::string(loaded.status().message()),
                AllOf(HasSubstr(Concat("device: \"", text, "\": a daemon serves one device")),
                      HasSubstr("--device=cuda:N"), HasSubstr("{uuid}.sock")));
  }
  EXPECT_THAT(ErrorOfJson(R"({"device": "GPU-01"})"),
              HasSubstr("device: \"GPU-01\" is not a device UUID"));
}

TEST_F(LoadConfigTest, TheHostsMemoryIsTheDefaultsMeasure) {
  const auto loaded = LoadConfig(std::vector<std::string_view>{"--pool-extent-bytes=2MiB"});
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const auto memory = HostMemoryOf({});
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_GT(loaded->config.pool_bytes, 0u);
  EXPECT_LE(loaded->config.pool_bytes, memory->bytes / 2);
  EXPECT_GT(loaded->config.pool_bytes + 2 * kMiB, memory->bytes / 2);
}

TEST_F(LoadConfigTest, APoolLargerThanThisMachineIsRefused) {
  const auto loaded = LoadConfig(std::vector<std::string_view>{"--pool-bytes=1048576T"});
  EXPECT_THAT(std::string(loaded.status().message()),
              AllOf(HasSubstr("pool_bytes: 1152921504606846976"),
                    HasSubstr("exceeds the memory of the device")));
}

TEST_F(LoadConfigTest, ADerivedPoolIsANote) {
  EXPECT_THAT(Load({})->notes,
              ElementsAre("pool 4.0 GiB of 8.0 GiB according to the test; --pool-bytes sets it",
                          "memory: pool_bytes 4.0 GiB + host_tier_bytes 1.6 GiB + raw_copy_bytes "
                          "491.5 MiB + messages 256.0 MiB + heap 256.0 MiB = 6.6 GiB of 8.0 GiB "
                          "according to the test"));
  EXPECT_THAT(Load({"--pool-bytes=1GiB"})->notes, ElementsAre(HasSubstr("pool_bytes 1.0 GiB + ")));
}

TEST_F(LoadConfigTest, CheckConfigAcceptsADeviceOfAnotherMachine) {
  const auto load = [](std::vector<std::string_view> args) { return LoadConfig(args); };
  EXPECT_FALSE(load({"--device=cuda:3"}).ok());
  const auto checked = load({"--device=cuda:3", "--check-config"});
  ASSERT_TRUE(checked.ok()) << checked.status();
  EXPECT_TRUE(checked->check_only);
  EXPECT_THAT(checked->notes,
              ElementsAre(AllOf(HasSubstr("not checked"), HasSubstr("\"cuda:3\""))));
  EXPECT_TRUE(load({"--device=cuda:3", "--check-config", "--pool-bytes=80GiB"}).ok());
  EXPECT_TRUE(load({"--device=cuda:3", "--check-config", "--listen=unix:/run/t/{uuid}.sock"}).ok());
  // What does not depend on the device is still checked.
  EXPECT_FALSE(load({"--device=cuda:3", "--check-config", "--max-sessions=0"}).ok());
}

TEST_F(LoadConfigTest, CheckConfigNamesEveryProblem) {
  const std::string json = "{\"max_sessions\": 0,\n\"pin_limit_ms\": 1, \"tail_ring_tiles\": 3}";
  const std::string file = (directory_ / "config.json").string();
  const auto checked = LoadJson(json, {"--check-config", "--compactor-threads=0"});
  EXPECT_THAT(std::string(checked.status().message()),
              AllOf(HasSubstr(Concat(file, ":2:39: tail_ring_tiles: 3 is not a power of two\n")),
                    HasSubstr(Concat(file, ":1:18: max_sessions: 0 is not from 1 to 4096\n")),
                    HasSubstr("\ncompactor_threads: 0 is not from 1 to 256\n"),
                    HasSubstr(Concat(file, ":2:17: pin_limit_ms: 1 is not from 10"))));
  // A start names the first.
  EXPECT_THAT(std::string(LoadJson(json).status().message()), Not(HasSubstr("\n")));
}

TEST_F(LoadConfigTest, HelpAndVersionNeedNoValidConfiguration) {
  const auto version = Load({"--config=/nonexistent", "--version"});
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version->print, Concat("tesserad ", Version(), "\n"));
  EXPECT_THAT(*Load({"--help"})->print, HasSubstr("Usage: tesserad"));
}

TEST_F(LoadConfigTest, PrintConfigRefusesAnInvalidOne) {
  EXPECT_FALSE(Load({"--max-sessions=0", "--print-config"}).ok());
}

}  // namespace
}  // namespace tessera::config
