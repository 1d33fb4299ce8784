#include "daemon/platform/peer_rules.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera {

namespace {

std::optional<std::uint32_t> ParseId(std::string_view text) {
  std::uint32_t id = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, id);
  // The largest value means "no user" in system calls.
  if (text.empty() || parsed.ec != std::errc() || parsed.ptr != end || id == ~0u) {
    return std::nullopt;
  }
  return id;
}

}  // namespace

bool PeerRules::Admits(const PeerCredentials& peer, std::uint32_t own_uid) const {
  if (open() || peer.uid == own_uid) return true;
  if (std::ranges::find(uids, peer.uid) != uids.end()) return true;
  return std::ranges::any_of(gids, [&](std::uint32_t gid) {
    return gid == peer.gid || std::ranges::find(peer.groups, gid) != peer.groups.end();
  });
}

std::string PeerRules::ToString() const {
  std::string text;
  for (const std::uint32_t uid : uids) Append(text, text.empty() ? "" : ",", "uid:", uid);
  for (const std::uint32_t gid : gids) Append(text, text.empty() ? "" : ",", "gid:", gid);
  return text;
}

absl::StatusOr<PeerRules> ParsePeerRules(std::string_view text) {
  PeerRules rules;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    const bool user = part.starts_with("uid:");
    const std::optional<std::uint32_t> id =
        user || part.starts_with("gid:") ? ParseId(part.substr(4)) : std::nullopt;
    if (!id.has_value() || comma == text.size() - 1) {
      return absl::InvalidArgumentError(Concat(Quoted(part),
                                               " is not \"uid:N\" or \"gid:N\" with N below ", ~0u,
                                               "; separate several by commas"));
    }
    (user ? rules.uids : rules.gids).push_back(*id);
    text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
  }
  return rules;
}

absl::Status CheckPeer(int socket, const PeerRules& rules) {
  if (rules.open()) return absl::OkStatus();
  const absl::StatusOr<PeerCredentials> peer = PeerOf(socket);
  if (!peer.ok()) return peer.status();
  if (rules.Admits(*peer, ::geteuid())) return absl::OkStatus();
  return absl::PermissionDeniedError(Concat("process ", peer->pid, " of user ", peer->uid,
                                            ", group ", peer->gid, "; unix_peers admits ",
                                            rules.ToString(), " and this daemon's user"));
}

}  // namespace tessera
