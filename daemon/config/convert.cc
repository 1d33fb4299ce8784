#include "daemon/config/convert.h"

#include <google/protobuf/util/json_util.h>

#include <utility>

#include "absl/status/status.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/config/cpu_list.h"
#include "daemon/config/values/file_mode.h"
#include "daemon/config/values/kv_events.h"
#include "daemon/config/values/unused_calls.h"

namespace tessera::config {
namespace {

using tessera::v1::DaemonConfig;
using tessera::v1::TenantConfig;

// Prefixes the message of `status` with the field's name.
absl::Status InField(std::string_view field, const absl::Status& status) {
  return absl::Status(status.code(), Concat(field, ": ", status.message()));
}

Tenant TenantFromMessage(const TenantConfig& message) {
  return {.name = message.name(),
          .token = message.token(),
          .token_file = message.token_file(),
          .soft_limit_bytes = message.soft_limit_bytes(),
          .hard_limit_bytes = message.hard_limit_bytes(),
          .reserved_bytes = message.reserved_bytes(),
          .max_sessions = message.max_sessions()};
}

// Fields whose text must be parsed: addresses, mode, peers, device, CPUs, log level and format.
absl::Status ParsedFromMessage(const DaemonConfig& message, Config& config) {
  if (message.listen_size() > 0) config.listen.clear();
  for (const std::string& text : message.listen()) {
    auto address = ParseListenAddress(text);
    if (!address.ok()) return InField("listen", address.status());
    config.listen.push_back(*std::move(address));
  }
  // Parses `text` with `parse` into `out`, if the field is present.
  const auto parsed = [](bool present, std::string_view field, std::string_view text,
                         const auto& parse, auto& out) -> absl::Status {
    if (!present) return absl::OkStatus();
    auto value = parse(text);
    if (!value.ok()) return InField(field, value.status());
    out = *std::move(value);
    return absl::OkStatus();
  };
  if (message.has_metrics_address() && message.metrics_address().empty()) {
    config.metrics_address.reset();
  } else if (absl::Status status =
                 parsed(message.has_metrics_address(), "metrics_address", message.metrics_address(),
                        ParseHostPort, config.metrics_address);
             !status.ok()) {
    return status;
  }
  for (const absl::Status& status : {
           parsed(message.has_unix_socket_mode(), "unix_socket_mode", message.unix_socket_mode(),
                  ParseFileMode, config.unix_socket_mode),
           parsed(!message.admin_listen().empty(), "admin_listen", message.admin_listen(),
                  ParseAdminAddress, config.admin_listen),
           parsed(!message.kv_events().empty(), "kv_events", message.kv_events(), ParseHostPort,
                  config.kv_events),
           parsed(!message.kv_events_replay().empty(), "kv_events_replay",
                  message.kv_events_replay(), ParseHostPort, config.kv_events_replay),
           parsed(message.has_kv_events_encoding(), "kv_events_encoding",
                  message.kv_events_encoding(), ParseEventEncoding, config.kv_events_encoding),
           parsed(message.has_unused_system_calls(), "unused_system_calls",
                  message.unused_system_calls(), ParseUnusedCalls, config.unused_system_calls),
           parsed(message.has_unix_peers(), "unix_peers", message.unix_peers(), ParsePeerRules,
                  config.unix_peers),
           parsed(message.has_device(), "device", message.device(), ParseDevice, config.device),
           parsed(message.has_compactor_cpus(), "compactor_cpus", message.compactor_cpus(),
                  ParseCpuList, config.compactor_cpus),
           parsed(message.has_log_level(), "log_level", message.log_level(), ParseLogLevel,
                  config.log_level),
           parsed(message.has_log_format(), "log_format", message.log_format(), ParseLogFormat,
                  config.log_format),
       }) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

std::string ToJson(const DaemonConfig& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  const auto status = google::protobuf::util::MessageToJsonString(message, &json, options);
  TESSERA_CHECK(status.ok(), Concat("DaemonConfig to JSON: ", status.message()));
  return json;
}

absl::StatusOr<Config> FromMessage(const DaemonConfig& message) {
  Config config;
  if (absl::Status status = ParsedFromMessage(message, config); !status.ok()) return status;

  const auto set = [](bool present, const auto& value, auto& out) {
    if (present) out = std::decay_t<decltype(out)>(value);
  };
  set(message.has_allow_core_dumps(), message.allow_core_dumps(), config.allow_core_dumps);
  set(message.has_tcp_peer_limit_ms(), message.tcp_peer_limit_ms(), config.tcp_peer_limit);
  set(message.has_tls_certificate_file(), message.tls_certificate_file(),
      config.tls_certificate_file);
  set(message.has_tls_key_file(), message.tls_key_file(), config.tls_key_file);
  set(message.has_tls_client_ca_file(), message.tls_client_ca_file(), config.tls_client_ca_file);
  set(message.has_pool_bytes(), message.pool_bytes(), config.pool_bytes);
  set(message.has_pool_extent_bytes(), message.pool_extent_bytes(), config.pool_extent_bytes);
  set(message.has_staging_bytes(), message.staging_bytes(), config.staging_bytes);
  set(message.has_tail_ring_tiles(), message.tail_ring_tiles(), config.tail_ring_tiles);
  set(message.has_tail_extent_bytes(), message.tail_extent_bytes(), config.tail_extent_bytes);
  set(message.has_directory_extent_bytes(), message.directory_extent_bytes(),
      config.directory_extent_bytes);
  set(message.has_max_sessions(), message.max_sessions(), config.max_sessions);
  set(message.has_max_sequences_per_tenant(), message.max_sequences_per_tenant(),
      config.max_sequences_per_tenant);
  set(message.has_max_models_per_tenant(), message.max_models_per_tenant(),
      config.max_models_per_tenant);
  set(message.has_max_prefixes_per_tenant(), message.max_prefixes_per_tenant(),
      config.max_prefixes_per_tenant);
  set(message.has_prefix_hash_seed(), message.prefix_hash_seed(), config.prefix_hash_seed);
  set(message.has_max_message_bytes(), message.max_message_bytes(), config.max_message_bytes);
  config.books = {message.books().begin(), message.books().end()};
  set(message.has_compactor_threads(), message.compactor_threads(), config.compactor_threads);
  set(message.has_raw_copy_bytes(), message.raw_copy_bytes(), config.raw_copy_bytes);
  set(message.has_host_tier_bytes(), message.host_tier_bytes(), config.host_tier_bytes);
  set(message.has_offload_idle_ms(), message.offload_idle_ms(), config.offload_idle);
  set(message.has_pressure_high_percent(), message.pressure_high_percent(),
      config.pressure_high_percent);
  set(message.has_pressure_low_percent(), message.pressure_low_percent(),
      config.pressure_low_percent);
  set(message.has_compactor_linger_ms(), message.compactor_linger_ms(), config.compactor_linger);
  set(message.has_pin_limit_ms(), message.pin_limit_ms(), config.pin_limit);
  set(message.has_drain_limit_ms(), message.drain_limit_ms(), config.drain_limit);
  set(message.has_slow_call_ms(), message.slow_call_ms(), config.slow_call);

  if (message.tenants_size() > 0) config.tenants.clear();
  for (const TenantConfig& tenant : message.tenants()) {
    config.tenants.push_back(TenantFromMessage(tenant));
  }
  return config;
}

DaemonConfig ToMessage(const Config& config) {
  DaemonConfig message;
  for (const ListenAddress& address : config.listen) message.add_listen(address.ToString());
  message.set_unix_socket_mode(FormatFileMode(config.unix_socket_mode));
  message.set_unix_peers(config.unix_peers.ToString());
  message.set_admin_listen(config.admin_listen.is_unix() ? config.admin_listen.ToString() : "");
  message.set_allow_core_dumps(config.allow_core_dumps);
  message.set_kv_events(config.kv_events ? config.kv_events->ToString() : "");
  message.set_kv_events_replay(config.kv_events_replay ? config.kv_events_replay->ToString() : "");
  message.set_kv_events_encoding(std::string(EventEncodingName(config.kv_events_encoding)));
  message.set_unused_system_calls(std::string(UnusedCallsName(config.unused_system_calls)));
  message.set_tcp_peer_limit_ms(static_cast<std::uint32_t>(config.tcp_peer_limit.count()));
  message.set_tls_certificate_file(config.tls_certificate_file);
  message.set_tls_key_file(config.tls_key_file);
  message.set_tls_client_ca_file(config.tls_client_ca_file);
  message.set_metrics_address(config.metrics_address ? config.metrics_address->ToString() : "");
  message.set_device(config.device.ToString());
  message.set_pool_bytes(config.pool_bytes);
  message.set_pool_extent_bytes(config.pool_extent_bytes);
  message.set_staging_bytes(config.staging_bytes);
  message.set_tail_ring_tiles(config.tail_ring_tiles);
  message.set_tail_extent_bytes(config.tail_extent_bytes);
  message.set_directory_extent_bytes(config.directory_extent_bytes);
  message.set_max_sessions(config.max_sessions);
  message.set_max_sequences_per_tenant(config.max_sequences_per_tenant);
  message.set_max_models_per_tenant(config.max_models_per_tenant);
  message.set_max_prefixes_per_tenant(config.max_prefixes_per_tenant);
  message.set_prefix_hash_seed(config.prefix_hash_seed);
  message.set_max_message_bytes(config.max_message_bytes);
  message.set_compactor_threads(config.compactor_threads);
  for (const std::string& path : config.books) message.add_books(path);
  message.set_compactor_cpus(FormatCpuList(config.compactor_cpus));
  message.set_raw_copy_bytes(config.raw_copy_bytes);
  if (config.host_tier_bytes.has_value()) {
    message.set_host_tier_bytes(*config.host_tier_bytes);
  }
  message.set_offload_idle_ms(static_cast<std::uint32_t>(config.offload_idle.count()));
  message.set_pressure_high_percent(config.pressure_high_percent);
  message.set_pressure_low_percent(config.pressure_low_percent);
  message.set_compactor_linger_ms(static_cast<std::uint32_t>(config.compactor_linger.count()));
  message.set_pin_limit_ms(static_cast<std::uint32_t>(config.pin_limit.count()));
  message.set_drain_limit_ms(static_cast<std::uint32_t>(config.drain_limit.count()));
  message.set_slow_call_ms(static_cast<std::uint32_t>(config.slow_call.count()));
  message.set_log_level(std::string(LogLevelName(config.log_level)));
  message.set_log_format(std::string(LogFormatName(config.log_format)));
  for (const Tenant& tenant : config.tenants) {
    TenantConfig* out = message.add_tenants();
    out->set_name(tenant.name);
    out->set_token(tenant.token_file.empty() ? tenant.token : "");
    out->set_token_file(tenant.token_file);
    out->set_soft_limit_bytes(tenant.soft_limit_bytes);
    out->set_hard_limit_bytes(tenant.hard_limit_bytes);
    out->set_reserved_bytes(tenant.reserved_bytes);
    out->set_max_sessions(tenant.max_sessions);
  }
  return message;
}

}  // namespace tessera::config
