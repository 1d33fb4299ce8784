#include "daemon/config/validate.h"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/config/limits.h"
#include "daemon/config/memory_budget.h"

namespace tessera::config {
namespace {

constexpr std::string_view kExampleUuid = "00000000-0000-0000-0000-000000000001";

// "67108864 (64.0 MiB)"
std::string Exact(std::uint64_t bytes) { return Concat(bytes, " (", FormatBytes(bytes), ")"); }

absl::Status Refuse(std::string_view field, std::string_view why) {
  return absl::InvalidArgumentError(Concat(field, ": ", why));
}

absl::Status CheckRange(std::string_view field, std::uint64_t value, Range range) {
  if (value >= range.min && value <= range.max) return absl::OkStatus();
  return Refuse(field, Concat(value, " is not from ", range.min, " to ", range.max));
}

absl::Status CheckMultiple(std::string_view field, std::uint64_t value, std::string_view unit_name,
                           std::uint64_t unit) {
  if (value % unit == 0) return absl::OkStatus();
  return Refuse(field, Concat(Exact(value), " is not a multiple of ", unit_name, Exact(unit),
                              "; the next lower multiple is ", value - value % unit));
}

absl::Status CheckExtent(std::string_view field, std::uint64_t value, Range range) {
  absl::Status status = CheckRange(field, value, range);
  if (status.ok()) status = CheckMultiple(field, value, "", kExtentUnit);
  return status;
}

absl::Status CheckPool(const Config& config, const DeviceMemory& memory) {
  if (config.pool_bytes > memory.bytes) {
    return Refuse("pool_bytes",
                  Concat(Exact(config.pool_bytes), " exceeds the memory of the device, ",
                         Exact(memory.bytes), " according to ", memory.source));
  }
  if (config.pool_bytes < config.pool_extent_bytes) {
    return Refuse("pool_bytes", Concat(Exact(config.pool_bytes), " is less than one extent, ",
                                       "pool_extent_bytes ", Exact(config.pool_extent_bytes)));
  }
  return CheckMultiple("pool_bytes", config.pool_bytes, "pool_extent_bytes ",
                       config.pool_extent_bytes);
}

absl::Status CheckBudget(const Config& config, const DeviceMemory& memory) {
  const MemoryBudget budget = BudgetOf(config, memory);
  if (budget.fits()) return absl::OkStatus();
  const bool tier = budget.host_tier_bytes > budget.pool_bytes;
  const bool raw = budget.raw_copy_bytes > std::max(budget.pool_bytes, budget.host_tier_bytes);
  return Refuse(raw    ? "raw_copy_bytes"
                : tier ? "host_tier_bytes"
                       : "pool_bytes",
                Concat("does not fit into the memory with the other parts: ", budget.ToString(),
                       "; lower one of them, or leave it out"));
}

absl::Status CheckAddresses(const Config& config) {
  if (config.listen.empty()) return Refuse("listen", "at least one address is needed");
  std::set<std::string> seen;
  for (const ListenAddress& address : config.listen) {
    const bool any_port = !address.is_unix() && address.tcp.port == 0;
    if (!any_port && !seen.insert(address.ToString()).second) {
      return Refuse("listen", Concat("\"", address.ToString(), "\" is listed twice"));
    }
  }
  if (config.metrics_address.has_value() && config.metrics_address->port != 0 &&
      seen.contains(config.metrics_address->ToString())) {
    return Refuse("metrics_address",
                  Concat("\"", config.metrics_address->ToString(), "\" is also a listen address"));
  }
  if (config.admin_listen.is_unix() && seen.contains(config.admin_listen.ToString())) {
    return Refuse("admin_listen", Concat("\"", config.admin_listen.ToString(),
                                         "\" is also a listen address, which workers use"));
  }
  // A mode without the owner's bits would lock out the user that runs the daemon.
  if (config.unix_socket_mode > 0777 || (config.unix_socket_mode & 0600) != 0600) {
    return Refuse("unix_socket_mode",
                  "the mode must be from 0600 to 0777 and let the owner read and write");
  }
  return absl::OkStatus();
}

absl::Status CheckEvents(const Config& config) {
  if (config.kv_events_replay.has_value() && !config.kv_events.has_value()) {
    return Refuse("kv_events_replay", "needs kv_events, whose events it repeats");
  }
  for (const auto& [field, address] : {std::pair("kv_events", config.kv_events),
                                       std::pair("kv_events_replay", config.kv_events_replay)}) {
    if (!address.has_value()) continue;
    in6_addr parsed;
    if (::inet_pton(AF_INET, address->host.c_str(), &parsed) != 1 &&
        ::inet_pton(AF_INET6, address->host.c_str(), &parsed) != 1) {
      return Refuse(field,
                    Concat("\"", address->host, "\" is not an IP address such as 127.0.0.1"));
    }
  }
  if (config.kv_events.has_value() && config.kv_events->port != 0 &&
      config.kv_events == config.kv_events_replay) {
    return Refuse("kv_events_replay",
                  Concat("\"", config.kv_events->ToString(), "\" is the address of kv_events"));
  }
  return absl::OkStatus();
}

absl::Status CheckTls(const Config& config) {
  const bool certificate = !config.tls_certificate_file.empty();
  if (certificate != !config.tls_key_file.empty()) {
    return certificate ? Refuse("tls_key_file", Concat("is missing; tls_certificate_file is \"",
                                                       config.tls_certificate_file, "\""))
                       : Refuse("tls_certificate_file", Concat("is missing; tls_key_file is \"",
                                                               config.tls_key_file, "\""));
  }
  if (!certificate && !config.tls_client_ca_file.empty()) {
    return Refuse("tls_client_ca_file", "requires tls_certificate_file and tls_key_file");
  }
  return absl::OkStatus();
}

bool IsTenantName(std::string_view name) {
  if (name.empty() || name.size() > kMaxTenantName) return false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    const bool inner = i > 0 && (c == '-' || c == '_' || c == '.');
    if (!plain && !inner) return false;
  }
  return true;
}

absl::Status CheckToken(std::string_view field, std::string_view token) {
  if (token.size() > kMaxToken) {
    return Refuse(field,
                  Concat("the token has ", token.size(), " characters; the limit is ", kMaxToken));
  }
  for (const char c : token) {
    if (c <= ' ' || c > '~') {
      return Refuse(field, "the token may contain only printable ASCII characters without spaces");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTenant(const std::string& field, const Tenant& tenant, const Config& config) {
  if (!IsTenantName(tenant.name)) {
    return Refuse(Concat(field, ".name"),
                  Concat("\"", tenant.name, "\" is not a tenant name: use 1 to ", kMaxTenantName,
                         " of a-z, 0-9, '-', '_' and '.', starting with a letter or digit"));
  }
  if (absl::Status status = CheckToken(Concat(field, ".token"), tenant.token); !status.ok()) {
    return status;
  }
  if (tenant.hard_limit_bytes > config.pool_bytes) {
    return Refuse(Concat(field, ".hard_limit_bytes"),
                  Concat(Exact(tenant.hard_limit_bytes), " of tenant \"", tenant.name,
                         "\" is more than pool_bytes, ", Exact(config.pool_bytes)));
  }
  if (tenant.soft_limit_bytes > tenant.hard_limit_bytes) {
    return Refuse(Concat(field, ".soft_limit_bytes"),
                  Concat(Exact(tenant.soft_limit_bytes), " of tenant \"", tenant.name,
                         "\" is more than its hard_limit_bytes, ", Exact(tenant.hard_limit_bytes)));
  }
  if (tenant.reserved_bytes > tenant.hard_limit_bytes) {
    return Refuse(Concat(field, ".reserved_bytes"),
                  Concat(Exact(tenant.reserved_bytes), " of tenant \"", tenant.name,
                         "\" is more than its hard_limit_bytes, ", Exact(tenant.hard_limit_bytes)));
  }
  if (tenant.max_sessions > config.max_sessions) {
    return Refuse(Concat(field, ".max_sessions"),
                  Concat(tenant.max_sessions, " of tenant \"", tenant.name,
                         "\" is more than max_sessions of the daemon, ", config.max_sessions));
  }
  return absl::OkStatus();
}

absl::Status CheckTenants(const Config& config) {
  if (absl::Status status = CheckRange("number of tenants", config.tenants.size(), kTenants);
      !status.ok()) {
    return status;
  }
  std::uint64_t reserved = 0;
  for (std::size_t i = 0; i < config.tenants.size(); ++i) {
    const Tenant& tenant = config.tenants[i];
    const std::string field = Concat("tenants[", i, "]");
    if (absl::Status status = CheckTenant(field, tenant, config); !status.ok()) return status;
    reserved += tenant.reserved_bytes;  // each is at most pool_bytes
    if (reserved > config.pool_bytes) {
      return Refuse(Concat(field, ".reserved_bytes"),
                    Concat(Exact(tenant.reserved_bytes), " of tenant \"", tenant.name,
                           "\" and those of the tenants before it are ", Exact(reserved),
                           ", more than pool_bytes, ", Exact(config.pool_bytes)));
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (config.tenants[j].name == tenant.name) {
        return Refuse(Concat(field, ".name"),
                      Concat("\"", tenant.name, "\" is also the name of tenants[", j, "]"));
      }
      if (config.tenants[j].token == tenant.token) {
        return Refuse(
            Concat(field, ".token"),
            Concat("tenants \"", config.tenants[j].name, "\" and \"", tenant.name,
                   tenant.token.empty() ? "\" both have no token" : "\" have the same token"));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status SetUuids(std::optional<DeviceUuid> uuid, Config& config) {
  if (!uuid.has_value()) uuid = config.device.uuid;
  // --check-config on a machine without the GPU that is named by its number.
  if (!uuid.has_value() && config.device.kind == DeviceChoice::Kind::kCuda) return absl::OkStatus();
  std::vector<ListenAddress*> addresses = {&config.admin_listen};
  for (ListenAddress& address : config.listen) addresses.push_back(&address);
  for (ListenAddress* const named : addresses) {
    ListenAddress& address = *named;
    if (!address.needs_uuid()) continue;
    if (!uuid.has_value()) {
      const bool automatic = config.device.kind == DeviceChoice::Kind::kAuto;
      return Refuse(named == &config.admin_listen ? "admin_listen" : "listen",
                    Concat("\"", address.ToString(), "\": the CPU has no UUID",
                           automatic ? ", and --device=auto found no usable GPU" : "",
                           "; give it one, as in --device=CPU-", kExampleUuid,
                           ", or name the socket without {uuid}"));
    }
    address.SetUuid(*uuid);
  }
  return absl::OkStatus();
}

}  // namespace

std::uint64_t DerivedReserve(const Config& config, const Tenant& tenant) {
  const std::uint64_t tenants = std::max<std::uint64_t>(config.tenants.size(), 1);
  // Directories and tails are in the pool, too.
  const std::uint64_t least = config.pool_extent_bytes + 2 * config.directory_extent_bytes;
  std::uint64_t reserve = config.pool_bytes / (2 * tenants);
  if (least <= config.pool_bytes / tenants) reserve = std::max(reserve, least);
  return std::min(reserve, tenant.hard_limit_bytes);
}

absl::Status ResolveDefaults(const DeviceMemory& memory, Config& config) {
  if (absl::Status status = SetUuids(memory.uuid, config); !status.ok()) return status;
  const auto worker = std::ranges::find_if(config.listen, &ListenAddress::is_unix);
  if (!config.admin_listen.is_unix() && worker != config.listen.end()) {
    config.admin_listen.unix_path = Concat(worker->unix_path, kAdminSuffix);
  }
  DeriveMemory(memory, config);
  if (config.pool_bytes == 0) {
    return Refuse("pool_bytes", Concat("what is left for it of the memory, ", Exact(memory.bytes),
                                       " according to ", memory.source,
                                       ", is less than one extent, pool_extent_bytes ",
                                       Exact(config.pool_extent_bytes)));
  }
  for (Tenant& tenant : config.tenants) {
    if (tenant.hard_limit_bytes == 0) tenant.hard_limit_bytes = config.pool_bytes;
    if (tenant.soft_limit_bytes == 0) tenant.soft_limit_bytes = tenant.hard_limit_bytes;
    if (tenant.reserved_bytes == 0) tenant.reserved_bytes = DerivedReserve(config, tenant);
  }
  return absl::OkStatus();
}

absl::Status Validate(const Config& config, const DeviceMemory& memory) {
  const std::vector<absl::Status> problems = FindProblems(config, memory);
  return problems.empty() ? absl::OkStatus() : problems.front();
}

std::vector<absl::Status> FindProblems(const Config& config, const DeviceMemory& memory) {
  const auto tiles = config.tail_ring_tiles;
  const auto milliseconds = [](std::chrono::milliseconds time) {
    return static_cast<std::uint64_t>(time.count());
  };
  std::vector<absl::Status> problems = {
      CheckAddresses(config),
      CheckEvents(config),
      CheckTls(config),
      CheckExtent("pool_extent_bytes", config.pool_extent_bytes, kPoolExtentBytes),
      CheckExtent("staging_bytes", config.staging_bytes, kStagingBytes),
      CheckExtent("tail_extent_bytes", config.tail_extent_bytes, kTailExtentBytes),
      CheckExtent("directory_extent_bytes", config.directory_extent_bytes, kDirectoryExtentBytes),
      CheckRange("tail_ring_tiles", tiles, kTailRingTiles),
      std::has_single_bit(tiles)
          ? absl::OkStatus()
          : Refuse("tail_ring_tiles", Concat(tiles, " is not a power of two")),
      CheckRange("max_sessions", config.max_sessions, kMaxSessions),
      CheckRange("max_sequences_per_tenant", config.max_sequences_per_tenant,
                 kMaxSequencesPerTenant),
      CheckRange("max_models_per_tenant", config.max_models_per_tenant, kMaxModelsPerTenant),
      CheckRange("max_prefixes_per_tenant", config.max_prefixes_per_tenant, kMaxPrefixesPerTenant),
      CheckRange("max_message_bytes", config.max_message_bytes, kMaxMessageBytes),
      CheckRange("compactor_threads", config.compactor_threads, kCompactorThreads),
      config.books.size() <= kBooks.max
          ? absl::OkStatus()
          : Refuse("books", Concat(config.books.size(), " files; at most ", kBooks.max)),
      CheckRange("raw_copy_bytes", config.raw_copy_bytes, kRawCopyBytes),
      CheckRange("host_tier_bytes", config.host_tier_bytes.value_or(0), kHostTierBytes),
      CheckRange("offload_idle_ms", milliseconds(config.offload_idle), kOffloadIdleMs),
      CheckRange("pressure_high_percent", config.pressure_high_percent, kPressurePercent),
      CheckRange("pressure_low_percent", config.pressure_low_percent, kPressurePercent),
      config.pressure_low_percent <= config.pressure_high_percent
          ? absl::OkStatus()
          : Refuse("pressure_low_percent",
                   Concat(config.pressure_low_percent, " is above pressure_high_percent, ",
                          config.pressure_high_percent)),
      CheckRange("compactor_linger_ms", milliseconds(config.compactor_linger), kCompactorLingerMs),
      CheckRange("pin_limit_ms", milliseconds(config.pin_limit), kPinLimitMs),
      CheckRange("drain_limit_ms", milliseconds(config.drain_limit), kDrainLimitMs),
      CheckRange("tcp_peer_limit_ms", milliseconds(config.tcp_peer_limit), kTcpPeerLimitMs),
      CheckRange("slow_call_ms", milliseconds(config.slow_call), kSlowCallMs),
      config.pool_extent_bytes > 0 ? CheckPool(config, memory) : absl::OkStatus(),
      CheckTenants(config),
  };
  // The sum says nothing new about a part that is beyond its own limit.
  if (std::ranges::all_of(problems, [](const absl::Status& status) { return status.ok(); })) {
    problems.push_back(CheckBudget(config, memory));
  }
  std::erase_if(problems, [](const absl::Status& status) { return status.ok(); });
  return problems;
}

}  // namespace tessera::config
