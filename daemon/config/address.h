// Addresses as they are written in the configuration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera::config {

// "host:port"; IPv6 hosts in brackets. Not resolved: whoever binds it does that.
struct HostPort {
  std::string host;  // without brackets; not empty
  std::uint16_t port = 0;

  std::string ToString() const;
  // Certainly reachable from this machine alone: localhost, 127.0.0.0/8 or ::1.
  bool IsLoopback() const;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// Where the gRPC door listens: a Unix socket, or host and port.
struct ListenAddress {
  std::string unix_path;  // empty: TCP
  HostPort tcp;

  bool is_unix() const { return !unix_path.empty(); }
  std::string ToString() const;  // "unix:/run/x.sock" or "host:port", as gRPC takes it
  friend bool operator==(const ListenAddress&, const ListenAddress&) = default;
};

// What stands beside a Unix socket: the descriptor socket PATH.fd and the lock file PATH.lock.
inline constexpr std::string_view kDescriptorSuffix = ".fd";
inline constexpr std::string_view kLockSuffix = ".lock";

// Bytes of a Unix socket's path, the ending zero not counted (sun_path, see unix(7)), so that the
// descriptor socket's path is none too long either.
inline constexpr std::size_t kMaxUnixPath = 107 - kDescriptorSuffix.size();

// INVALID_ARGUMENT names the text and what is wrong with it.
absl::StatusOr<HostPort> ParseHostPort(std::string_view text);
absl::StatusOr<ListenAddress> ParseListenAddress(std::string_view text);

}  // namespace tessera::config
