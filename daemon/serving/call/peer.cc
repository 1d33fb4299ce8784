#include "daemon/serving/call/peer.h"

#include <algorithm>
#include <charconv>

#include "absl/status/statusor.h"

namespace tessera::serving {

namespace {

constexpr std::string_view kLocalPeer = "fd:";  // followed by the descriptor (Server::AcceptOn)

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view hex) { return hex.find_first_not_of('0') == std::string_view::npos; }

}  // namespace

bool IsLocal(const grpc::ServerContextBase& context) {
  return context.peer().starts_with(kLocalPeer);
}

std::optional<PeerCredentials> CallerProcess(const grpc::ServerContextBase& context) {
  const std::string peer = context.peer();
  if (!peer.starts_with(kLocalPeer)) return std::nullopt;
  int fd = -1;
  const char* const end = peer.data() + peer.size();
  if (std::from_chars(peer.data() + kLocalPeer.size(), end, fd).ptr != end) return std::nullopt;
  absl::StatusOr<PeerCredentials> credentials = PeerOf(fd);
  // The descriptor belongs to this call's connection as long as the connection lives.
  if (!credentials.ok() || context.IsCancelled()) return std::nullopt;
  return *std::move(credentials);
}

std::string_view TraceIdIn(std::string_view traceparent) {
  // version "-" trace id "-" parent id "-" flags, and more after a further "-" in later versions.
  constexpr std::size_t kLength = 55;
  if (traceparent.size() < kLength) return {};
  const std::string_view version = traceparent.substr(0, 2);
  const std::string_view trace = traceparent.substr(3, 32);
  const std::string_view parent = traceparent.substr(36, 16);
  const bool dashes = traceparent[2] == '-' && traceparent[35] == '-' && traceparent[52] == '-';
  const bool ends = traceparent.size() == kLength || (version != "00" && traceparent[55] == '-');
  if (!dashes || !ends || !IsHex(version) || version == "ff") return {};
  if (!IsHex(trace) || IsZero(trace) || !IsHex(parent) || IsZero(parent)) return {};
  return IsHex(traceparent.substr(53, 2)) ? trace : std::string_view();
}

std::string TraceIdOf(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("traceparent");
  if (found == metadata.end()) return {};
  return std::string(TraceIdIn({found->second.data(), found->second.size()}));
}

}  // namespace tessera::serving
