#include "daemon/platform/tcp_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera {

namespace {

constexpr int kBacklog = 128;

void Set(int socket, int level, int option, int value) {
  // None of the options set here can fail on a TCP socket.
  (void)::setsockopt(socket, level, option, &value, sizeof value);
}

absl::StatusOr<Fd> Listen(const addrinfo& address, std::uint16_t port) {
  Fd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return ErrnoStatus("the system has no such socket");
  Set(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  sockaddr_storage bound{};
  std::memcpy(&bound, address.ai_addr, address.ai_addrlen);
  if (address.ai_family == AF_INET6) {
    auto& six = reinterpret_cast<sockaddr_in6&>(bound);
    six.sin6_port = htons(port);
    Set(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, IN6_IS_ADDR_UNSPECIFIED(&six.sin6_addr) ? 0 : 1);
  } else {
    reinterpret_cast<sockaddr_in&>(bound).sin_port = htons(port);
  }
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&bound), address.ai_addrlen) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    if (errno == EADDRINUSE) {
      return absl::AlreadyExistsError("the port is in use by another process");
    }
    return ErrnoStatus("the system refuses to listen there");
  }
  return socket;
}

bool IsSame(const addrinfo& a, const addrinfo& b) {
  return a.ai_addrlen == b.ai_addrlen && std::memcmp(a.ai_addr, b.ai_addr, a.ai_addrlen) == 0;
}

// Whether an address before `one` equals it: resolvers return some names' addresses twice.
bool IsRepeated(const addrinfo* list, const addrinfo* one) {
  for (; list != one; list = list->ai_next) {
    if (IsSame(*list, *one)) return true;
  }
  return false;
}

}  // namespace

absl::StatusOr<std::vector<Fd>> ListenTcp(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
    return absl::NotFoundError(Concat("host \"", host, "\": ", ::gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, &::freeaddrinfo);
  std::vector<Fd> sockets;
  absl::Status failure;
  for (const addrinfo* one = list.get(); one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    if (IsRepeated(list.get(), one)) continue;
    // With port 0, the first address decides.
    absl::StatusOr<Fd> socket =
        Listen(*one, port == 0 && !sockets.empty() ? LocalPort(sockets[0].get()) : port);
    if (socket.ok()) {
      sockets.push_back(*std::move(socket));
    } else if (failure.ok() || absl::IsAlreadyExists(socket.status())) {
      failure = socket.status();
    }
  }
  // "localhost" may stand for an IPv6 address that the machine lacks, but a port in use is an error
  // on any address.
  if (sockets.empty() || (port != 0 && absl::IsAlreadyExists(failure))) {
    return failure.ok() ? absl::NotFoundError(Concat("host \"", host, "\" has no IP address"))
                        : failure;
  }
  return sockets;
}

std::uint16_t LocalPort(int socket) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
  if (address.ss_family != AF_INET) return 0;
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

bool IsAwaited(int listening) {
  pollfd poll = {listening, POLLIN, 0};
  return ::poll(&poll, 1, 0) == 1 && (poll.revents & POLLIN) != 0;
}

Fd AcceptTcp(int listening) {
  return Fd(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

void SendAtOnce(int socket) { Set(socket, IPPROTO_TCP, TCP_NODELAY, 1); }

void SetPeerLimit(int socket, std::chrono::seconds limit) {
  // Probes for unanswered silence, and the time limit for data that is not acknowledged.
  constexpr int kProbes = 3;
  const int seconds = static_cast<int>(limit.count());
  const int between = std::max(1, seconds / (2 * kProbes));
  Set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  Set(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds - kProbes * between));
  Set(socket, IPPROTO_TCP, TCP_KEEPINTVL, between);
  Set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
  Set(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000);
}

}  // namespace tessera
