#include "daemon/config/config.h"

#include <algorithm>
#include <charconv>

#include "absl/status/status.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::config {

std::string DeviceChoice::ToString() const {
  if (uuid.has_value()) return uuid->ToString();
  switch (kind) {
    case Kind::kAuto:
      return "auto";
    case Kind::kCpu:
      return "cpu";
    case Kind::kCuda:
      return Concat("cuda:", ordinal);
  }
  return "unknown";
}

absl::StatusOr<DeviceChoice> ParseDevice(std::string_view text) {
  using Kind = DeviceChoice::Kind;
  if (text == "auto") return DeviceChoice{.kind = Kind::kAuto};
  if (text == "cpu") return DeviceChoice{.kind = Kind::kCpu};
  if (HasDeviceUuidPrefix(text)) {
    const absl::StatusOr<DeviceUuid> uuid = ParseDeviceUuid(text);
    if (!uuid.ok()) return uuid.status();
    const bool is_cpu = uuid->kind == DeviceUuid::Kind::kCpu;
    return DeviceChoice{.kind = is_cpu ? Kind::kCpu : Kind::kCuda, .uuid = *uuid};
  }
  if (text == "cuda:all" || text == "cuda" || text == "all") {
    return absl::InvalidArgumentError(Concat(
        "\"", text, "\": a daemon serves one device; start one daemon per GPU, each with its ",
        "own --device=cuda:N and --metrics port, and all with ",
        "--listen=unix:/run/tessera/{uuid}.sock"));
  }
  constexpr std::string_view kCuda = "cuda:";
  if (text.starts_with(kCuda)) {
    DeviceChoice device{.kind = Kind::kCuda};
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + kCuda.size(), end, device.ordinal);
    if (parsed.ec == std::errc() && parsed.ptr == end && device.ordinal < 1024) return device;
  }
  return absl::InvalidArgumentError(Concat(
      "\"", text, "\" is not a device: use auto, cpu, cuda:N with N below 1024, or a UUID as ",
      "nvidia-smi -L prints it"));
}

std::uint64_t UsablePoolBytes(const Config& config) {
  const std::uint64_t extent = std::max<std::uint64_t>(config.pool_extent_bytes, 1);
  const std::uint64_t beside = std::min(config.directory_extent_bytes, config.pool_bytes);
  return (config.pool_bytes - beside) / extent * extent;
}

std::vector<std::string> Warnings(const Config& config) {
  std::vector<std::string> warnings;
  const std::uint64_t usable = UsablePoolBytes(config);
  if (config.pool_bytes != 0 && config.pool_bytes - usable > config.pool_bytes / 4) {
    warnings.push_back(Concat("pool_bytes: of ", FormatBytes(config.pool_bytes), " at most ",
                              FormatBytes(usable), " can hold KV, in extents of ",
                              FormatBytes(config.pool_extent_bytes), " beside a directory of ",
                              FormatBytes(config.directory_extent_bytes),
                              "; lower pool_extent_bytes, or raise pool_bytes"));
  }
  for (const ListenAddress& address : config.listen) {
    if (address.is_unix() || address.tcp.IsLoopback()) continue;
    for (const Tenant& tenant : config.tenants) {
      if (!tenant.token.empty()) continue;
      warnings.push_back(Concat("listen: ", address.ToString(), " is open to the network, and ",
                                "tenant \"", tenant.name, "\" has no token: anyone may attach"));
    }
    if (config.tls_certificate_file.empty()) {
      warnings.push_back(Concat("listen: ", address.ToString(), " is open to the network without ",
                                "TLS: tokens, keys and values are sent in the clear"));
    }
  }
  if (config.kv_events.has_value() && !config.kv_events->IsLoopback()) {
    warnings.push_back(Concat("kv_events: ", config.kv_events->ToString(),
                              " is open to the network: whoever connects reads token ids"));
  }
  if (!config.admin_listen.is_unix() &&
      std::ranges::none_of(config.listen, &ListenAddress::is_unix)) {
    warnings.push_back(
        "admin_listen: is empty, and listen has no Unix socket; operators have no "
        "address, so only signals can drain or reload the daemon");
  }
  const auto is_tcp = [](const ListenAddress& address) { return !address.is_unix(); };
  if (!config.tls_certificate_file.empty() && std::ranges::none_of(config.listen, is_tcp)) {
    warnings.push_back("tls_certificate_file: has no effect, because listen has no TCP address");
  }
  if ((config.unix_socket_mode & 0007) != 0 && config.unix_peers.open()) {
    warnings.push_back(
        "unix_socket_mode: every user of this machine may connect to the Unix sockets");
  }
  return warnings;
}

}  // namespace tessera::config
