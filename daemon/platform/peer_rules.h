// Who may connect to a Unix socket, beside whoever its file mode keeps out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/platform/unix_socket.h"

namespace tessera {

// Users, and groups that a process is in, the supplementary ones too. Without any: everybody. The
// daemon's own user may always: it could stop the daemon as well.
struct PeerRules {
  std::vector<std::uint32_t> uids;
  std::vector<std::uint32_t> gids;

  bool operator==(const PeerRules&) const = default;
  bool open() const { return uids.empty() && gids.empty(); }
  bool Admits(const PeerCredentials& peer, std::uint32_t own_uid) const;
  // As ParsePeerRules takes it.
  std::string ToString() const;
};

// "uid:1000,gid:27"; "" admits everybody.
absl::StatusOr<PeerRules> ParsePeerRules(std::string_view text);

// Whether this socket's peer may connect. PERMISSION_DENIED names who it is and who may.
absl::Status CheckPeer(int socket, const PeerRules& rules);

}  // namespace tessera
