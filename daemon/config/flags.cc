#include "daemon/config/flags.h"

#include <google/protobuf/descriptor.h>

#include <array>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/did_you_mean.h"
#include "daemon/base/strings.h"
#include "daemon/base/utf8.h"
#include "daemon/config/convert.h"
#include "daemon/config/values/field_value.h"
#include "daemon/config/values/file_mode.h"

namespace tessera::config {
namespace {

using google::protobuf::FieldDescriptor;
using tessera::v1::DaemonConfig;

struct FlagRow {
  std::string_view flag;
  std::string_view value;  // placeholder for the value in --help
  const char* field;       // of DaemonConfig
  std::string_view help;
};

// One row per field of DaemonConfig except `tenants`. The message defines the types.
constexpr std::array<FlagRow, 41> kRows = {{
    {"listen", "ADDRESS", "listen",
     "Address to listen on: unix:PATH or HOST:PORT. {uuid} in PATH is the UUID of the device. "
     "Repeat "
     "it or separate addresses by commas."},
    {"unix-socket-mode", "MODE", "unix_socket_mode", "File mode of the Unix sockets, octal."},
    {"unix-peers", "LIST", "unix_peers",
     "Users and groups that may connect to the Unix sockets, e.g. uid:1000,gid:27. Empty: as the "
     "file mode allows."},
    {"admin-listen", "ADDRESS", "admin_listen",
     "Unix socket for operators, unix:PATH. Empty: the first socket's path and .admin."},
    {"allow-core-dumps", "BOOL", "allow_core_dumps",
     "Allow core dumps and debuggers, which see rows and tokens: true or false."},
    {"kv-events", "HOST:PORT", "kv_events",
     "Address of KV events for routers, over ZeroMQ. They contain token ids. Empty: none."},
    {"kv-events-replay", "HOST:PORT", "kv_events_replay",
     "Address at which routers ask for KV events that they have missed. Empty: none."},
    {"kv-events-encoding", "ENCODING", "kv_events_encoding",
     "Encoding of KV events: map, or array for older routers."},
    {"unused-system-calls", "ACTION", "unused_system_calls",
     "What happens to system calls that the daemon has no use for: auto, allow, log, refuse or "
     "kill."},
    {"tcp-peer-limit-ms", "MS", "tcp_peer_limit_ms",
     "Close TCP connections whose peer has been gone for this long."},
    {"tls-certificate-file", "FILE", "tls_certificate_file",
     "PEM file with the daemon's certificate; turns on TLS for TCP addresses."},
    {"tls-key-file", "FILE", "tls_key_file", "PEM file with the private key of that certificate."},
    {"tls-client-ca-file", "FILE", "tls_client_ca_file",
     "PEM file with authorities; TCP clients need a certificate from one of them."},
    {"metrics", "HOST:PORT", "metrics_address",
     "Address of the HTTP pages /metrics, /healthz, /readyz and /version. Empty: none."},
    {"device", "DEVICE", "device",
     "Device that holds the pools: auto, cpu, cuda:N, or a UUID: GPU-..., MIG-..., or CPU-... as "
     "the name of this daemon's host memory."},
    {"pool-bytes", "BYTES", "pool_bytes",
     "Maximum size of all tenants' pools, tails and staging arenas, e.g. 8GiB. 0: half of the "
     "device's memory, or what other parts of the memory leave."},
    {"pool-extent-bytes", "BYTES", "pool_extent_bytes", "Size by which a pool grows and shrinks."},
    {"staging-bytes", "BYTES", "staging_bytes", "Size of a session's staging arena."},
    {"tail-ring-tiles", "N", "tail_ring_tiles",
     "Size of a lane's tail ring in tiles of 32 tokens; a power of two."},
    {"tail-extent-bytes", "BYTES", "tail_extent_bytes",
     "Size by which a session's tail memory grows."},
    {"directory-extent-bytes", "BYTES", "directory_extent_bytes",
     "Size by which a tenant's directory grows."},
    {"max-sessions", "N", "max_sessions", "Maximum number of attached sessions."},
    {"max-sequences-per-tenant", "N", "max_sequences_per_tenant",
     "Maximum number of sequences per tenant."},
    {"max-models-per-tenant", "N", "max_models_per_tenant",
     "Maximum number of registered models per tenant."},
    {"max-prefixes-per-tenant", "N", "max_prefixes_per_tenant",
     "Maximum number of published prefixes per tenant."},
    {"prefix-hash-seed", "N", "prefix_hash_seed",
     "Seed of the prefix hash chain; must be equal on nodes that share prefixes."},
    {"max-message-bytes", "BYTES", "max_message_bytes",
     "Maximum size of a gRPC message, in either direction."},
    {"compactor-threads", "N", "compactor_threads",
     "Number of threads that encode tails and compute strategies."},
    {"compactor-cpus", "LIST", "compactor_cpus",
     "CPUs that the compactor threads are pinned to, e.g. 2-3,8. Empty: any."},
    {"book", "FILE", "books",
     "Book file for planes:book=NAME, made by tessera calibrate. Repeat it or separate files by "
     "commas."},
    {"raw-copy-bytes", "BYTES", "raw_copy_bytes",
     "Host memory for raw copies and observations, shared equally by the tenants. 0: 6 % of the "
     "host's memory."},
    {"host-tier-bytes", "BYTES", "host_tier_bytes",
     "Host memory for offloaded sequences, shared equally by the tenants. 0: no offloading. "
     "Default: 20 % of the host's memory."},
    {"offload-idle-ms", "MS", "offload_idle_ms",
     "Time a sequence must be idle before it is offloaded in the background."},
    {"pressure-high-percent", "N", "pressure_high_percent",
     "Reclaim idle memory above this percentage of a memory limit."},
    {"pressure-low-percent", "N", "pressure_low_percent", "Stop reclaiming below this percentage."},
    {"compactor-linger-ms", "MS", "compactor_linger_ms",
     "Time that the compactor keeps polling for work before it sleeps."},
    {"pin-limit-ms", "MS", "pin_limit_ms", "Time after which a reader's pin is revoked."},
    {"drain-limit-ms", "MS", "drain_limit_ms",
     "Time that a draining daemon waits for its sessions to end."},
    {"slow-call-ms", "MS", "slow_call_ms",
     "Time above which a call is logged as slow. 0: no call is."},
    {"log-level", "LEVEL", "log_level",
     "Least severe level to log: debug, info, warning, error or off."},
    {"log-format", "FORMAT", "log_format", "Format of the log on stderr: text or json."},
}};

constexpr std::pair<std::string_view, Flags::Action> kActions[] = {
    {"help", Flags::Action::kHelp},
    {"version", Flags::Action::kVersion},
    {"check-config", Flags::Action::kCheckConfig},
    {"print-config", Flags::Action::kPrintConfig},
    {"print-policies", Flags::Action::kPrintPolicies},
};

// The flags of --prepare-directory, as given.
struct DirectoryFlags {
  static constexpr std::string_view kNames[] = {"prepare-directory", "owner", "mode"};
  std::optional<std::string_view> values[std::size(kNames)];

  std::optional<std::string_view>* Find(std::string_view name) {
    for (std::size_t i = 0; i < std::size(kNames); ++i) {
      if (kNames[i] == name) return &values[i];
    }
    return nullptr;
  }
};

absl::Status UnknownFlag(std::string_view name) {
  std::vector<std::string_view> names = {"config"};
  names.insert(names.end(), std::begin(DirectoryFlags::kNames), std::end(DirectoryFlags::kNames));
  for (const FlagRow& row : kRows) names.push_back(row.flag);
  for (const auto& [flag, action] : kActions) names.push_back(flag);
  return absl::InvalidArgumentError(
      Concat("--", name, " is not a flag; --help lists all flags", DidYouMean(name, names)));
}

const FlagRow* FindRow(std::string_view flag) {
  for (const FlagRow& row : kRows) {
    if (row.flag == flag) return &row;
  }
  return nullptr;
}

const FieldDescriptor* FieldOf(const FlagRow& row) {
  const FieldDescriptor* field = DaemonConfig::descriptor()->FindFieldByName(row.field);
  TESSERA_CHECK(field != nullptr, row.field);
  return field;
}

absl::Status BadValue(const FlagRow& row, std::string_view why) {
  return absl::InvalidArgumentError(Concat("--", row.flag, ": ", why));
}

void AddCommaSeparated(std::string_view value, const FieldDescriptor* field, DaemonConfig& out) {
  while (true) {
    const std::size_t comma = value.find(',');
    out.GetReflection()->AddString(&out, field, std::string(Trim(value.substr(0, comma))));
    if (comma == std::string_view::npos) return;
    value.remove_prefix(comma + 1);
  }
}

absl::Status SetField(const FlagRow& row, std::string_view value, DaemonConfig& out) {
  // --print-config writes JSON, which can only hold UTF-8.
  if (!IsUtf8(value)) {
    return absl::InvalidArgumentError(
        Concat("--", row.flag, " is ", Quoted(value), ", which is not UTF-8"));
  }
  const FieldDescriptor* const field = FieldOf(row);
  if (field->is_repeated()) {
    AddCommaSeparated(value, field, out);
    return absl::OkStatus();
  }
  const absl::Status status = SetFromText(field, value, out);
  return status.ok() ? status : BadValue(row, AsStringView(status.message()));
}

// The default of a field as --help prints it.
std::string DefaultText(const FlagRow& row, const DaemonConfig& defaults) {
  const FieldDescriptor* field = FieldOf(row);
  const google::protobuf::Reflection* reflection = defaults.GetReflection();
  if (field->is_repeated()) {
    return reflection->FieldSize(defaults, field) == 0
               ? "none"
               : reflection->GetRepeatedString(defaults, field, 0);
  }
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING: {
      const std::string text = reflection->GetString(defaults, field);
      return text.empty() ? "\"\"" : text;
    }
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(defaults, field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_UINT32:
      return Concat(reflection->GetUInt32(defaults, field));
    case FieldDescriptor::CPPTYPE_UINT64: {
      const std::uint64_t bytes = reflection->GetUInt64(defaults, field);
      return bytes == 0 ? "0" : FormatBytes(bytes);
    }
    default:
      break;
  }
  CheckFailed(__FILE__, __LINE__, "flag of a type that has no syntax", row.flag);
}

// An argument, split at '='. Without '=', the next argument is the value.
struct Argument {
  std::string_view name;
  std::optional<std::string_view> value;
};

absl::StatusOr<Argument> Split(std::string_view argument) {
  if (argument == "-h") return Argument{"help", std::nullopt};
  if (!argument.starts_with("--") || argument.size() == 2) {
    return absl::InvalidArgumentError(
        Concat("\"", argument, "\" is not a flag; --help lists all flags"));
  }
  argument.remove_prefix(2);
  const std::size_t equals = argument.find('=');
  if (equals == std::string_view::npos) return Argument{argument, std::nullopt};
  return Argument{argument.substr(0, equals), argument.substr(equals + 1)};
}

std::optional<Flags::Action> ActionOf(std::string_view name) {
  for (const auto& [flag, action] : kActions) {
    if (flag == name) return action;
  }
  return std::nullopt;
}

bool EndsParsing(Flags::Action action) {
  using Action = Flags::Action;
  return action == Action::kHelp || action == Action::kVersion || action == Action::kPrintPolicies;
}

absl::Status SetConfigFile(std::string_view file, Flags& flags) {
  if (flags.config_file.has_value()) {
    return absl::InvalidArgumentError(
        Concat("--config is given twice: \"", *flags.config_file, "\" and \"", file, "\""));
  }
  flags.config_file = std::string(file);
  return absl::OkStatus();
}

// Makes the request of --prepare-directory, if it is given.
absl::Status SetDirectory(const DirectoryFlags& given, Flags& flags) {
  const auto& [path, owner, mode] = given.values;
  if (!path.has_value()) {
    if (!owner.has_value() && !mode.has_value()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        Concat("--", owner.has_value() ? "owner" : "mode", " is for --prepare-directory only"));
  }
  if (flags.action != Flags::Action::kRun || flags.config_file.has_value() ||
      flags.overrides.ByteSizeLong() > 0) {
    return absl::InvalidArgumentError("--prepare-directory takes only --owner and --mode");
  }
  if (!owner.has_value()) {
    return absl::InvalidArgumentError(
        "--prepare-directory needs --owner=UID:GID, the user that the daemon runs as");
  }
  const absl::StatusOr<Owner> ids = ParseOwner(*owner);
  if (!ids.ok()) return absl::InvalidArgumentError(Concat("--owner: ", ids.status().message()));
  flags.action = Flags::Action::kPrepareDirectory;
  flags.directory = {.path = std::string(*path), .uid = ids->uid, .gid = ids->gid};
  if (!mode.has_value()) return absl::OkStatus();
  const absl::StatusOr<std::uint32_t> bits = ParseFileMode(*mode);
  if (!bits.ok()) return absl::InvalidArgumentError(Concat("--mode: ", bits.status().message()));
  // The daemon makes its sockets there. Setuid means nothing on a directory.
  if ((*bits & 0700) != 0700 || (*bits & 04000) != 0) {
    return absl::InvalidArgumentError(
        Concat("--mode: ", FormatFileMode(*bits),
               " must let the owner read, write and search, and must not be setuid"));
  }
  flags.directory.mode = *bits;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Flags> ParseFlags(std::span<const std::string_view> args) {
  Flags flags;
  DirectoryFlags directory;
  for (std::size_t i = 0; i < args.size(); ++i) {
    absl::StatusOr<Argument> argument = Split(args[i]);
    if (!argument.ok()) return argument.status();
    const std::string_view name = argument->name;

    if (const auto action = ActionOf(name); action.has_value()) {
      if (argument->value.has_value()) {
        return absl::InvalidArgumentError(Concat("--", name, " takes no value"));
      }
      if (EndsParsing(*action)) return Flags{.action = *action};
      flags.action = *action;
      continue;
    }
    const FlagRow* const row = FindRow(name);
    std::optional<std::string_view>* const of_directory = directory.Find(name);
    if (row == nullptr && of_directory == nullptr && name != "config") return UnknownFlag(name);
    if (!argument->value.has_value()) {
      if (i + 1 == args.size()) {
        return absl::InvalidArgumentError(Concat("--", name, " needs a value"));
      }
      argument->value = args[++i];
    }
    absl::Status status;
    if (of_directory != nullptr) {
      *of_directory = *argument->value;
    } else if (row != nullptr) {
      status = SetField(*row, *argument->value, flags.overrides);
    } else {
      status = SetConfigFile(*argument->value, flags);
    }
    if (!status.ok()) return status;
  }
  if (absl::Status status = SetDirectory(directory, flags); !status.ok()) return status;
  return flags;
}

void MergeFlags(const DaemonConfig& overrides, DaemonConfig& message) {
  if (overrides.listen_size() > 0) message.clear_listen();
  if (overrides.books_size() > 0) message.clear_books();
  message.MergeFrom(overrides);
}

std::vector<std::string> FieldsOf(const DaemonConfig& overrides) {
  std::vector<const FieldDescriptor*> fields;
  overrides.GetReflection()->ListFields(overrides, &fields);
  std::vector<std::string> names;
  for (const FieldDescriptor* field : fields) names.push_back(field->name());
  return names;
}

std::vector<FlagHelp> FlagTable() {
  std::vector<FlagHelp> table = {
      {"--config=FILE", "File with the configuration, including tenants: JSON with comments."}};
  const DaemonConfig defaults = ToMessage(Config{});
  for (const FlagRow& row : kRows) {
    table.push_back({Concat("--", row.flag, "=", row.value),
                     Concat(row.help, " [default: ", DefaultText(row, defaults),
                            "; in the file: ", row.field, "]")});
  }
  table.insert(
      table.end(),
      {{"--check-config", "Check the configuration, print \"ok\" or what is wrong, and exit."},
       {"--print-config", "Print the effective configuration as JSON and exit."},
       {"--print-policies", "Print every policy and its options and exit."},
       {"--prepare-directory=DIR",
        "Make the directory of the sockets, or adjust its owner and mode, and exit. Run it as "
        "root."},
       {"--owner=UID:GID", "Numeric owner for --prepare-directory."},
       {"--mode=MODE", "Octal mode for --prepare-directory. [default: 0750]"},
       {"--version", "Print the version and exit."},
       {"--help, -h", "Print this help and exit."}});
  return table;
}

std::string HelpText() {
  std::string text =
      "tesserad: the KV-cache daemon for the inference workers of this node\n\n"
      "Usage: tesserad [--config FILE] [flags]\n\n"
      "Flags override the fields of the file. Sizes are bytes, or as in 512MiB, 8GiB, 1.5G; times "
      "are\n"
      "milliseconds, or as in 500ms, 10s, 5m.\n\n";
  constexpr std::size_t kColumn = 34;
  for (const FlagHelp& flag : FlagTable()) {
    Append(text, "  ", flag.flag);
    text.append(flag.flag.size() < kColumn ? kColumn - flag.flag.size() : 1, ' ');
    Append(text, flag.help, "\n");
  }
  return text;
}

}  // namespace tessera::config
