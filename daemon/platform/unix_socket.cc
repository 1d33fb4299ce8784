#include "daemon/platform/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "daemon/base/strings.h"

namespace tessera {

namespace {

absl::StatusOr<sockaddr_un> Address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() > MaxUnixPath()) {
    return absl::InvalidArgumentError(Concat("socket path \"", path, "\" has ", path.size(),
                                             " bytes; the limit is ", MaxUnixPath()));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace

std::size_t MaxUnixPath() { return sizeof(sockaddr_un::sun_path) - 1; }

absl::StatusOr<Fd> ListenUnix(const std::string& path, unsigned mode, bool non_blocking) {
  absl::StatusOr<sockaddr_un> address = Address(path);
  if (!address.ok()) return address.status();
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | (non_blocking ? SOCK_NONBLOCK : 0), 0));
  if (!socket.valid()) return ErrnoStatus("socket");
  ::unlink(path.c_str());
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&*address), sizeof *address) != 0) {
    return ErrnoStatus(Concat("binding ", path));
  }
  if (::chmod(path.c_str(), mode) != 0) return ErrnoStatus(Concat("setting mode of ", path));
  if (::listen(socket.get(), 128) != 0) return ErrnoStatus(Concat("listening on ", path));
  return socket;
}

absl::StatusOr<Fd> ConnectUnix(const std::string& path) {
  absl::StatusOr<sockaddr_un> address = Address(path);
  if (!address.ok()) return address.status();
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus("socket");
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&*address), sizeof *address) != 0) {
    return absl::UnavailableError(ErrnoStatus(Concat("connecting to ", path)).message());
  }
  return socket;
}

absl::Status ProbeUnix(const std::string& path) {
  absl::StatusOr<sockaddr_un> address = Address(path);
  if (!address.ok()) return address.status();
  const Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return ErrnoStatus("socket");
  const int result =
      ::connect(socket.get(), reinterpret_cast<sockaddr*>(&*address), sizeof *address);
  // EAGAIN: the listener has not accepted earlier connections yet.
  if (result == 0 || errno == EAGAIN) return absl::OkStatus();
  return ErrnoStatus(Concat("connecting to ", path));
}

absl::Status SendMessage(int socket, std::span<const std::byte> bytes, int fd) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    iovec io{const_cast<std::byte*>(bytes.data()) + sent, bytes.size() - sent};
    msghdr message{};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    if (fd >= 0 && sent == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    const ssize_t n = ::sendmsg(socket, &message, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      const bool shortage = sent == 0 && IsShortage(errno);
      const absl::Status why = ErrnoStatus("sending a descriptor message");
      return shortage ? absl::ResourceExhaustedError(why.message())
                      : absl::UnavailableError(why.message());
    }
    sent += static_cast<std::size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status ReceiveMessage(int socket, std::span<std::byte> bytes, Fd* fd) {
  std::size_t received = 0;
  while (received < bytes.size()) {
    // Room for a few descriptors, so that unexpected ones are received and closed, not leaked.
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))];
    iovec io{bytes.data() + received, bytes.size() - received};
    msghdr message{};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (n < 0) {
      if (errno == EINTR) continue;
      return absl::UnavailableError(ErrnoStatus("receiving a descriptor message").message());
    }
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int raw;
        std::memcpy(&raw, CMSG_DATA(header) + i * sizeof(int), sizeof raw);
        Fd owned(raw);
        if (fd != nullptr && !fd->valid()) *fd = std::move(owned);
      }
    }
    if (n == 0) return absl::UnavailableError("the peer closed the descriptor socket");
    received += static_cast<std::size_t>(n);
  }
  return absl::OkStatus();
}

bool HasRoom(int socket) {
  pollfd poll = {socket, POLLOUT, 0};
  return ::poll(&poll, 1, 0) == 1 && (poll.revents & POLLOUT) != 0;
}

absl::StatusOr<PeerCredentials> PeerOf(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return ErrnoStatus("reading peer credentials");
  }
  PeerCredentials peer = {credentials.pid, credentials.uid, credentials.gid, {}};
  // With too small a buffer, the call fails with ERANGE and returns the size needed.
  length = 0;
  while (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, peer.groups.data(), &length) != 0) {
    if (errno != ERANGE) return ErrnoStatus("reading the peer's groups");
    peer.groups.resize(length / sizeof(gid_t));
  }
  peer.groups.resize(length / sizeof(gid_t));
  return peer;
}

}  // namespace tessera
