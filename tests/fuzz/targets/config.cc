// The daemon's configuration: flags, one per line, then after a zero byte the text of a file. An
// accepted configuration must print as JSON that parses to the same configuration. Opens no files.
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/config/convert.h"
#include "daemon/config/cpu_list.h"
#include "daemon/config/flags.h"
#include "daemon/config/json_config.h"
#include "daemon/config/load.h"
#include "daemon/config/validate.h"
#include "tests/fuzz/fuzz_target.h"

namespace tessera::fuzz {
namespace {

using config::Config;

const config::DeviceMemory kMemory = {.bytes = 64 * kGiB, .source = "the test"};

void CheckError(const absl::Status& status) {
  TESSERA_CHECK(status.code() == absl::StatusCode::kInvalidArgument, status.ToString());
  TESSERA_CHECK(!status.message().empty(), "an error has a message");
}

void CheckAddresses(const std::string& text) {
  if (const auto address = config::ParseListenAddress(text); address.ok()) {
    const auto again = config::ParseListenAddress(address->ToString());
    TESSERA_CHECK(again.ok() && *again == *address, address->ToString());
  }
  if (const auto address = config::ParseHostPort(text); address.ok()) {
    const auto again = config::ParseHostPort(address->ToString());
    TESSERA_CHECK(again.ok() && *again == *address, address->ToString());
  }
  if (const auto device = config::ParseDevice(text); device.ok()) {
    const auto again = config::ParseDevice(device->ToString());
    TESSERA_CHECK(again.ok() && *again == *device, device->ToString());
  }
  if (const auto cpus = config::ParseCpuList(text); cpus.ok()) {
    const auto again = config::ParseCpuList(config::FormatCpuList(*cpus));
    TESSERA_CHECK(again.ok() && *again == *cpus, config::FormatCpuList(*cpus));
  }
}

void CheckRoundTrip(const Config& config) {
  const std::string json = config::PrintConfig(config);
  v1::DaemonConfig message;
  const absl::Status read = config::FromJson(json, &message);
  TESSERA_CHECK(read.ok(), read.ToString());
  absl::StatusOr<Config> again = config::FromMessage(message);
  TESSERA_CHECK(again.ok(), again.status().ToString());
  TESSERA_CHECK(*again == config, json);
  const absl::Status sound = config::Validate(*again, kMemory);
  TESSERA_CHECK(sound.ok(), sound.ToString());
}

void Run(std::string_view flags_text, std::string_view json) {
  std::vector<std::string_view> args;
  while (!flags_text.empty()) {
    const std::size_t end = std::min(flags_text.find('\n'), flags_text.size());
    args.push_back(flags_text.substr(0, end));
    flags_text.remove_prefix(std::min(end + 1, flags_text.size()));
  }
  for (const std::string_view arg : args) CheckAddresses(std::string(arg));
  const absl::StatusOr<config::Flags> flags = config::ParseFlags(args);
  if (!flags.ok()) return CheckError(flags.status());
  v1::DaemonConfig message;
  if (absl::Status status = config::FromJson(json.empty() ? "{}" : json, &message); !status.ok()) {
    return CheckError(status);
  }
  config::MergeFlags(flags->overrides, message);
  absl::StatusOr<Config> config = config::FromMessage(message);
  if (!config.ok()) return CheckError(config.status());
  // Token files are not read here. A Config that has read one prints only the file's name.
  for (config::Tenant& tenant : config->tenants) {
    if (!tenant.token_file.empty()) tenant.token.clear();
  }
  if (absl::Status status = config::ResolveDefaults(kMemory, *config); !status.ok()) {
    return CheckError(status);
  }
  if (absl::Status status = config::Validate(*config, kMemory); !status.ok()) {
    return CheckError(status);
  }
  CheckRoundTrip(*config);
}

}  // namespace

std::vector<Seed> Seeds() {
  using std::string_literals::operator""s;
  Config config;
  config.pool_bytes = kGiB;
  config.compactor_cpus = {0, 1, 3};
  config.tenants = {{.name = "a", .token = "secret"}, {.name = "b"}};
  std::vector<Seed> seeds = {
      {"flags",
       "--listen=unix:/run/x.sock\n--listen=[::1]:50051\n--pool-bytes=1GiB\n--device=cpu\n"
       "--log-level=debug"s},
      {"values", "unix:/run/x.sock\n[::1]:9464\ncuda:1\n2-3,8"s},
      {"defaults", "\0{}"s},
      {"comments",
       "\0// a\n{ # b\n \"poolBytes\": \"1.5GiB\", /* c */ \"drain_limit_ms\": \"10s\", "
       "\"unix_peers\": \"\\u0075id:1\", \"tenants\": [{\"name\": \"a\", \"token\": null}]}"s},
      {"whole", Concat("--max-sessions=7\n"s, std::string(1, '\0'), config::PrintConfig(config))}};
  return seeds;
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::size_t end = std::min(text.find('\0'), text.size());
  tessera::fuzz::Run(text.substr(0, end), text.substr(std::min(end + 1, text.size())));
  return 0;
}
