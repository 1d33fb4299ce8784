#include "client/rpc/daemon_directory.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "client/rpc/channel.h"
#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::client {

namespace {

constexpr std::size_t kMostNames = 16;  // in a message

// The path of a Unix address: unix:///run/x is unix:/run/x.
std::string PathOf(const std::string& address) {
  std::string_view path = std::string_view(address).substr(address.find(':') + 1);
  if (path.starts_with("//")) path.remove_prefix(2);
  while (path.starts_with("//")) path.remove_prefix(1);
  return std::string(path);
}

std::string Names(const std::vector<DaemonSocket>& sockets) {
  std::string names;
  for (std::size_t i = 0; i < std::min(sockets.size(), kMostNames); ++i) {
    Append(names, names.empty() ? "" : ", ",
           std::filesystem::path(sockets[i].path).filename().string());
  }
  if (sockets.size() > kMostNames) Append(names, " and ", sockets.size() - kMostNames, " more");
  return names;
}

std::string ForDevice(const WantedDevice& wanted) {
  return wanted.uuid.empty() ? "" : Concat(" for ", wanted.uuid, " (", wanted.source, ")");
}

// The sockets that may serve the wanted device, dead or alive.
std::vector<DaemonSocket> Candidates(const std::vector<DaemonSocket>& sockets,
                                     const WantedDevice& wanted) {
  if (wanted.uuid.empty()) return sockets;
  std::vector<DaemonSocket> named;
  std::vector<DaemonSocket> nameless;
  for (const DaemonSocket& socket : sockets) {
    if (!socket.uuid.has_value()) {
      nameless.push_back(socket);
    } else if (socket.uuid->ToString().starts_with(wanted.uuid)) {
      named.push_back(socket);
    }
  }
  return named.empty() ? nameless : named;
}

absl::Status NoneFor(const std::string& path, const std::vector<DaemonSocket>& sockets,
                     const WantedDevice& wanted) {
  return absl::UnavailableError(
      Concat(path, " has no socket", ForDevice(wanted), ". ",
             sockets.empty() ? "It has no other either" : Concat("It has ", Names(sockets)),
             ". Does the daemon of that device run with --listen=unix:", path, "{uuid}.sock?"));
}

absl::Status SeveralFor(const std::string& path, const std::vector<DaemonSocket>& sockets,
                        const WantedDevice& wanted) {
  std::string why;
  if (wanted.uuid.empty() && !wanted.source.empty()) {
    why = Concat(", and this process has no GPU that picks one (", wanted.source, ")");
  }
  return absl::FailedPreconditionError(
      Concat(path, " has ", sockets.size(), " sockets", ForDevice(wanted), why, ": ",
             Names(sockets), ". Choose one with the option \"device\" (tessera: --device), a UUID ",
             "or the beginning of one, or give the address of one socket"));
}

}  // namespace

bool IsDirectoryAddress(const std::string& address) {
  if (!IsUnixAddress(address)) return false;
  const std::string path = PathOf(address);
  std::error_code error;
  return path.ends_with('/') || std::filesystem::is_directory(path, error);
}

absl::StatusOr<std::vector<DaemonSocket>> ListDaemons(const std::string& address) {
  const std::string path = PathOf(address);
  std::error_code error;
  std::filesystem::directory_iterator entry(path, error);
  std::vector<DaemonSocket> sockets;
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;  // a file that has just been removed
    if (name.ends_with(kDescriptorSuffix) || name.ends_with(kAdminSuffix)) continue;
    if (!entry->is_socket(ignored)) continue;
    sockets.push_back({.path = entry->path().string(), .uuid = FindDeviceUuid(name)});
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(), Concat("reading the directory of sockets ", path));
  }
  std::sort(sockets.begin(), sockets.end(),
            [](const auto& a, const auto& b) { return a.path < b.path; });
  return sockets;
}

absl::StatusOr<DaemonSocket> PickDaemon(const std::string& address, const WantedDevice& wanted) {
  const absl::StatusOr<std::vector<DaemonSocket>> sockets = ListDaemons(address);
  if (!sockets.ok()) return sockets.status();
  const std::string path = (std::filesystem::path(PathOf(address)) / "").string();
  std::vector<DaemonSocket> live;
  absl::Status unusable;
  for (DaemonSocket& socket : Candidates(*sockets, wanted)) {
    const absl::Status status = ProbeUnix(socket.path);
    if (status.ok()) {
      live.push_back(std::move(socket));
    } else if (unusable.ok() || absl::IsPermissionDenied(status)) {
      unusable = status;
    }
  }
  if (live.size() == 1) return std::move(live.front());
  if (live.size() > 1) return SeveralFor(path, live, wanted);
  if (unusable.ok()) return NoneFor(path, *sockets, wanted);
  if (absl::IsPermissionDenied(unusable)) {
    return absl::PermissionDeniedError(
        Concat(AsStringView(unusable.message()),
               ". This process needs the group of the socket, as main or supplementary group"));
  }
  return absl::UnavailableError(Concat("no daemon answers", ForDevice(wanted), " in ", path, ": ",
                                       AsStringView(unusable.message()),
                                       ". A daemon that was killed leaves its socket"));
}

absl::Status CheckDevice(const v1::Welcome& welcome, const WantedDevice& wanted) {
  const std::string& serves = welcome.device_uuid_text();
  if (wanted.uuid.empty() || serves.starts_with(wanted.uuid)) return absl::OkStatus();
  // Any process can use KV in host memory.
  if (!wanted.is_explicit && welcome.device_uuid().empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      Concat("the daemon serves ", serves.empty() ? "a device without UUID, " : serves + ", ",
             welcome.device(), ", and not ", wanted.uuid, " (", wanted.source, ")"));
}

}  // namespace tessera::client
