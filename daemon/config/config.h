// Config: the daemon's configuration as a typed struct. LoadConfig builds it, complete and valid.
// proto/tessera/v1/config.proto documents the fields, their units and limits.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/bytes.h"
#include "daemon/base/log.h"
#include "daemon/config/address.h"
#include "daemon/config/values/kv_events.h"
#include "daemon/config/values/unused_calls.h"
#include "daemon/platform/device_uuid.h"
#include "daemon/platform/peer_rules.h"

namespace tessera::config {

struct DeviceChoice {
  enum class Kind : std::uint8_t { kAuto, kCpu, kCuda };
  Kind kind = Kind::kAuto;
  std::uint32_t ordinal = 0;  // of a CUDA device
  // Chooses the CUDA device instead of the ordinal, or names the CPU.
  std::optional<DeviceUuid> uuid;

  std::string ToString() const;  // "auto", "cpu", "cuda:1", "GPU-...", "MIG-...", "CPU-..."
  friend bool operator==(const DeviceChoice&, const DeviceChoice&) = default;
};
absl::StatusOr<DeviceChoice> ParseDevice(std::string_view text);

struct Tenant {
  std::string name;
  std::string token;       // that Hello must present, from either source; empty: none
  std::string token_file;  // the file the token was read from; empty: none
  std::uint64_t soft_limit_bytes = 0;
  std::uint64_t hard_limit_bytes = 0;
  std::uint64_t reserved_bytes = 0;  // of the pool, which no other tenant can take
  std::uint32_t max_sessions = 0;    // 0: only max_sessions of the daemon applies

  friend bool operator==(const Tenant&, const Tenant&) = default;
};

// The initialisers are the defaults. 0 means "derived" for pool_bytes, raw_copy_bytes and the
// tenants' limits, as no path does for admin_listen; a loaded Config holds the derived values.
struct Config {
  std::vector<ListenAddress> listen = {{.unix_path = std::string(kDefaultSocketPath), .tcp = {}}};
  std::uint32_t unix_socket_mode = 0660;
  PeerRules unix_peers;
  ListenAddress admin_listen;  // a Unix socket; without a path: derived, or none
  std::chrono::milliseconds tcp_peer_limit{30000};
  bool allow_core_dumps = false;
  UnusedCalls unused_system_calls = UnusedCalls::kAuto;
  std::optional<HostPort> kv_events;         // nullopt: no events
  std::optional<HostPort> kv_events_replay;  // likewise
  EventEncoding kv_events_encoding = EventEncoding::kMap;
  // PEM files for the TCP addresses; empty: no TLS, or no client certificates.
  std::string tls_certificate_file;
  std::string tls_key_file;
  std::string tls_client_ca_file;
  std::optional<HostPort> metrics_address = HostPort{.host = "127.0.0.1", .port = 9464};

  DeviceChoice device;
  std::uint64_t pool_bytes = 0;
  std::uint64_t pool_extent_bytes = 64 * kMiB;
  std::uint64_t staging_bytes = 64 * kMiB;  // per session
  std::uint32_t tail_ring_tiles = 4;
  std::uint64_t tail_extent_bytes = 16 * kMiB;
  std::uint64_t directory_extent_bytes = 2 * kMiB;

  std::uint32_t max_sessions = 64;
  std::uint32_t max_sequences_per_tenant = 65536;
  std::uint32_t max_models_per_tenant = 64;
  std::uint32_t max_prefixes_per_tenant = 4096;
  std::uint64_t prefix_hash_seed = 0;
  std::uint64_t max_message_bytes = 16 * kMiB;

  std::uint32_t compactor_threads = 2;
  std::vector<std::uint32_t> compactor_cpus;  // ascending, each once; empty: any
  std::chrono::milliseconds compactor_linger{0};
  std::vector<std::string> books;  // paths of book files
  std::uint64_t raw_copy_bytes = 0;
  std::optional<std::uint64_t> host_tier_bytes;  // 0: no offloading; nullopt: derived
  std::chrono::milliseconds offload_idle{1000};
  std::uint32_t pressure_high_percent = 90;  // of pool_bytes, and of a tenant's hard limit
  std::uint32_t pressure_low_percent = 80;
  std::chrono::milliseconds pin_limit{2000};
  std::chrono::milliseconds drain_limit{10000};
  std::chrono::milliseconds slow_call{1000};  // 0: none

  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
  std::vector<Tenant> tenants = {{.name = "default"}};

  friend bool operator==(const Config&, const Config&) = default;
};

// The part of pool_bytes that can hold KV: whole extents, beside one directory extent.
std::uint64_t UsablePoolBytes(const Config& config);

// Warnings about settings that are allowed but probably unintended, for the log at start.
std::vector<std::string> Warnings(const Config& config);

}  // namespace tessera::config
