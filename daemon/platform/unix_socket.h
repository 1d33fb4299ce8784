// Unix stream sockets that carry small fixed messages and file descriptors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/platform/fd.h"

namespace tessera {

// Binds and listens. A leftover socket file is replaced: the caller holds the lock file that proves
// no live daemon owns it. `mode` is set before anyone can connect.
absl::StatusOr<Fd> ListenUnix(const std::string& path, unsigned mode, bool non_blocking);

absl::StatusOr<Fd> ConnectUnix(const std::string& path);

// Sends all of `bytes`, with `fd` attached where it is >= 0. Never raises SIGPIPE.
// RESOURCE_EXHAUSTED where this process or the system has too many descriptors open or under way:
// nothing was sent then. Else UNAVAILABLE.
absl::Status SendMessage(int socket, std::span<const std::byte> bytes, int fd = -1);

// Receives exactly bytes.size() bytes; blocks. A peer that closes first gives UNAVAILABLE. At most
// one descriptor is taken, close-on-exec; any others are closed.
absl::Status ReceiveMessage(int socket, std::span<std::byte> bytes, Fd* fd = nullptr);

// Whether the peer has read most of what was sent to it.
bool HasRoom(int socket);

struct PeerCredentials {
  std::int64_t pid;  // 0 across PID namespaces: good for logs, never for trust
  std::uint32_t uid;
  std::uint32_t gid;
  std::vector<std::uint32_t> groups;  // the supplementary ones
};
absl::StatusOr<PeerCredentials> PeerOf(int socket);

// The longest path a Unix socket address holds.
std::size_t MaxUnixPath();

}  // namespace tessera
