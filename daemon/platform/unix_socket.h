// Unix stream sockets that carry small fixed messages and file descriptors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/platform/fd.h"

namespace tessera {

// Files next to the socket PATH of a daemon: the descriptor socket PATH.fd, the lock file
// PATH.lock, and the operator's socket PATH.admin.
inline constexpr std::string_view kDescriptorSuffix = ".fd";
inline constexpr std::string_view kLockSuffix = ".lock";
inline constexpr std::string_view kAdminSuffix = ".admin";

// Binds and listens. It replaces a leftover socket file, so the caller must hold the LockFile,
// which proves that no live daemon uses it. `mode` is set before a peer can connect.
absl::StatusOr<Fd> ListenUnix(const std::string& path, unsigned mode, bool non_blocking);

absl::StatusOr<Fd> ConnectUnix(const std::string& path);
// Whether a process listens on the socket: connects and closes. PERMISSION_DENIED if this process
// may not connect; any other error means that nobody answers. Never blocks.
absl::Status ProbeUnix(const std::string& path);

// Sends all of `bytes`, with `fd` attached if it is >= 0. Never raises SIGPIPE. Fails with
// RESOURCE_EXHAUSTED if too many descriptors are open or in flight in this process or the system
// (nothing was sent), else with UNAVAILABLE.
absl::Status SendMessage(int socket, std::span<const std::byte> bytes, int fd = -1);

// Receives exactly bytes.size() bytes; blocks. UNAVAILABLE if the peer closes first. Takes at most
// one descriptor, close-on-exec, and closes any others.
absl::Status ReceiveMessage(int socket, std::span<std::byte> bytes, Fd* fd = nullptr);

// Whether the socket has room to send, i.e. the peer has read most of what was sent.
bool HasRoom(int socket);

struct PeerCredentials {
  std::int64_t pid;  // 0 across PID namespaces: use it in logs only
  std::uint32_t uid;
  std::uint32_t gid;
  std::vector<std::uint32_t> groups;  // supplementary groups
};
absl::StatusOr<PeerCredentials> PeerOf(int socket);

// The longest path that a Unix socket address can hold.
std::size_t MaxUnixPath();

}  // namespace tessera
