// Restricts which users and groups may connect to a Unix socket, in addition to its file mode.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/platform/unix_socket.h"

namespace tessera {

// The admitted users and groups; a peer's supplementary groups count. If both lists are empty,
// every peer is admitted. The daemon's own user is always admitted.
struct PeerRules {
  std::vector<std::uint32_t> uids;
  std::vector<std::uint32_t> gids;

  bool operator==(const PeerRules&) const = default;
  bool open() const { return uids.empty() && gids.empty(); }
  bool Admits(const PeerCredentials& peer, std::uint32_t own_uid) const;
  // In the form that ParsePeerRules accepts.
  std::string ToString() const;
};

// Parses "uid:1000,gid:27"; "" admits every peer.
absl::StatusOr<PeerRules> ParsePeerRules(std::string_view text);

// Checks the peer of a connected socket. PERMISSION_DENIED names the peer and the rules.
absl::Status CheckPeer(int socket, const PeerRules& rules);

}  // namespace tessera
