// Parses and formats the addresses in the configuration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/platform/device_uuid.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::config {

// "host:port", with IPv6 hosts in brackets. The host is not resolved here.
struct HostPort {
  std::string host;  // without brackets; not empty
  std::uint16_t port = 0;

  std::string ToString() const;
  // Whether only this machine can reach it: localhost, 127.0.0.0/8 or ::1.
  bool IsLoopback() const;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// An address for gRPC to listen on: a Unix socket, or host and port.
struct ListenAddress {
  std::string unix_path;  // empty: TCP
  HostPort tcp;

  bool is_unix() const { return !unix_path.empty(); }
  // Whether the path contains kUuidPlaceholder.
  bool needs_uuid() const;
  // Replaces each placeholder.
  void SetUuid(const DeviceUuid& uuid);
  std::string ToString() const;  // "unix:/run/x.sock" or "host:port", as gRPC expects it
  friend bool operator==(const ListenAddress&, const ListenAddress&) = default;
};

// The socket on which the daemon listens if the configuration names no address.
inline constexpr std::string_view kDefaultSocketPath = "/run/tessera/tesserad.sock";

// Longest Unix socket path in bytes. sun_path holds 107 without the final zero (see unix(7)), and
// the path of the operator's socket must fit too.
inline constexpr std::size_t kMaxUnixPath = 107 - kAdminSuffix.size();

// In the path of a Unix socket, stands for the UUID of the daemon's device.
inline constexpr std::string_view kUuidPlaceholder = "{uuid}";

// INVALID_ARGUMENT names the text and the reason.
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);
absl::StatusOr<ListenAddress> ParseListenAddress(std::string_view text);
// A Unix socket for operators; its path may end in kAdminSuffix.
absl::StatusOr<ListenAddress> ParseAdminAddress(std::string_view text);

}  // namespace tessera::config
