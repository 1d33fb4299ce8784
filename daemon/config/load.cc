#include "daemon/config/load.h"

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "daemon/config/convert.h"
#include "daemon/config/flags.h"
#include "daemon/config/json_config.h"
#include "daemon/config/limits.h"
#include "daemon/config/memory_budget.h"
#include "daemon/platform/memory_limit.h"
#include "daemon/platform/read_file.h"

namespace tessera::config {
namespace {

absl::Status ReadTokenFiles(Config& config) {
  for (std::size_t i = 0; i < config.tenants.size(); ++i) {
    Tenant& tenant = config.tenants[i];
    if (tenant.token_file.empty()) continue;
    const std::string field = Concat("tenants[", i, "].token_file of tenant \"", tenant.name, "\"");
    if (!tenant.token.empty()) {
      return absl::InvalidArgumentError(Concat(field, ": token is set too; set only one of them"));
    }
    if (absl::Status status = CheckSecret(tenant.token_file); !status.ok()) {
      return absl::Status(status.code(), Concat(field, ": ", status.message()));
    }
    const absl::StatusOr<std::string> text = ReadFile(tenant.token_file, 4 * kMaxToken);
    if (!text.ok()) {
      return absl::Status(text.status().code(), Concat(field, ": ", text.status().message()));
    }
    tenant.token = std::string(Trim(*text));
    // An empty file is a secret that was not written yet, and must not mean "no token needed".
    if (tenant.token.empty()) {
      return absl::InvalidArgumentError(Concat(field, ": \"", tenant.token_file, "\" is empty"));
    }
  }
  return absl::OkStatus();
}

// The configuration file as it was read.
struct File {
  std::string path;
  tessera::v1::DaemonConfig message;
  FieldPlaces places;

  // Adds file, line and column to an error that names a field of the file.
  absl::Status Locate(const absl::Status& status) const {
    const absl::Status located = places.Locate(status);
    if (located == status) return status;
    return absl::Status(status.code(), Concat(path, ":", located.message()));
  }
  // One error with one line for each problem.
  absl::Status LocateAll(const std::vector<absl::Status>& problems) const {
    std::string lines;
    for (const absl::Status& problem : problems) {
      Append(lines, lines.empty() ? "" : "\n", Locate(problem).message());
    }
    return absl::InvalidArgumentError(lines);
  }
};

absl::StatusOr<File> ReadConfigFile(const std::string& path) {
  const absl::StatusOr<std::string> json = ReadFile(path, kMaxConfigFile);
  if (!json.ok()) {
    return absl::Status(json.status().code(), Concat("--config: ", json.status().message()));
  }
  File file{.path = path};
  const absl::Status status = FromJson(*json, &file.message, &file.places);
  if (!status.ok()) return absl::Status(status.code(), Concat(path, ":", status.message()));
  return file;
}

// The file's fields under the flags' fields, with tokens read, and nothing derived or validated.
absl::StatusOr<Config> StatedConfig(const Flags& flags, const File& file) {
  tessera::v1::DaemonConfig message = file.message;
  MergeFlags(flags.overrides, message);
  absl::StatusOr<Config> config = FromMessage(message);
  if (!config.ok()) return config;
  if (absl::Status status = ReadTokenFiles(*config); !status.ok()) return status;
  return config;
}

absl::StatusOr<Invocation> ResolveConfig(const Flags& flags, const File& file,
                                         const MemoryOf& memory_of) {
  absl::StatusOr<Config> config = StatedConfig(flags, file);
  if (!config.ok()) return config.status();
  Invocation invocation{.config = *std::move(config), .print = std::nullopt};
  const std::string device = invocation.config.device.ToString();

  absl::StatusOr<DeviceMemory> memory = memory_of(invocation.config.device);
  const bool derived = invocation.config.pool_bytes == 0;
  if (!memory.ok()) {
    const std::string why = Concat("device: \"", device, "\": ", memory.status().message());
    if (flags.action != Flags::Action::kCheckConfig) {
      return absl::Status(memory.status().code(), why);
    }
    invocation.notes.push_back(Concat("not checked against the device's memory: ", why));
    memory = DeviceMemory{.bytes = kUnknownMemory, .source = ""};
  }
  if (absl::Status status = ResolveDefaults(*memory, invocation.config); !status.ok()) {
    return status;
  }
  const std::vector<absl::Status> problems = FindProblems(invocation.config, *memory);
  if (!problems.empty()) {
    return flags.action == Flags::Action::kCheckConfig ? file.LocateAll(problems) : problems[0];
  }
  if (memory->bytes == kUnknownMemory) return invocation;
  if (derived) {
    invocation.notes.push_back(Concat("pool ", FormatBytes(invocation.config.pool_bytes), " of ",
                                      FormatBytes(memory->bytes), " according to ", memory->source,
                                      "; --pool-bytes sets it"));
  }
  invocation.notes.push_back(Concat("memory: ", BudgetOf(invocation.config, *memory).ToString()));
  return invocation;
}

absl::StatusOr<Invocation> EffectiveConfig(const Flags& flags, const MemoryOf& memory_of) {
  absl::StatusOr<File> file = File();
  if (flags.config_file.has_value()) file = ReadConfigFile(*flags.config_file);
  if (!file.ok()) return file.status();
  for (const std::string& field : FieldsOf(flags.overrides)) file->places.Remove(field);
  absl::StatusOr<Invocation> invocation = ResolveConfig(flags, *file, memory_of);
  if (!invocation.ok()) return file->Locate(invocation.status());
  return invocation;
}

}  // namespace

absl::StatusOr<DeviceMemory> HostMemoryOf(const DeviceChoice& choice) {
  if (choice.kind == DeviceChoice::Kind::kCuda) {
    return absl::FailedPreconditionError("this build or this node has no CUDA device");
  }
  absl::StatusOr<MemoryLimit> limit = DetectMemoryLimit();
  if (!limit.ok()) return limit.status();
  return DeviceMemory{
      .bytes = limit->bytes, .source = std::move(limit->source), .uuid = choice.uuid};
}

absl::StatusOr<Invocation> LoadConfig(std::span<const std::string_view> args,
                                      const MemoryOf& memory_of) {
  absl::StatusOr<Flags> flags = ParseFlags(args);
  if (!flags.ok()) return flags.status();
  if (flags->action == Flags::Action::kHelp) {
    return Invocation{.config = {}, .print = HelpText()};
  }
  if (flags->action == Flags::Action::kVersion) {
    return Invocation{
        .config = {},
        .print = Concat("tesserad ", Version(), Commit().empty() ? "" : " ", Commit(), "\n")};
  }
  if (flags->action == Flags::Action::kPrintPolicies) {
    return Invocation{.config = {}, .print = std::nullopt, .print_policies = true};
  }
  if (flags->action == Flags::Action::kPrepareDirectory) {
    return Invocation{
        .config = {}, .print = std::nullopt, .prepare_directory = std::move(flags->directory)};
  }
  absl::StatusOr<Invocation> invocation = EffectiveConfig(*flags, memory_of);
  if (!invocation.ok()) return invocation;
  invocation->check_only = flags->action == Flags::Action::kCheckConfig;
  if (flags->action == Flags::Action::kPrintConfig) {
    invocation->print = PrintConfig(invocation->config);
  }
  return invocation;
}

std::string PrintConfig(const Config& config) { return ToJson(ToMessage(config)); }

}  // namespace tessera::config
