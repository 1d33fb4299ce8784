#include "daemon/platform/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "daemon/base/strings.h"
#include "daemon/platform/fd.h"

namespace tessera {

void ServiceManager::Reloading() const {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const std::int64_t microseconds = std::int64_t{now.tv_sec} * 1'000'000 + now.tv_nsec / 1000;
  Send(Concat("RELOADING=1\nMONOTONIC_USEC=", microseconds));
}

void ServiceManager::Stopping(std::chrono::microseconds limit) const {
  Send(Concat("STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=", limit.count()));
}

void ServiceManager::Send(std::string_view message) const {
  sockaddr_un address{};
  if (socket_.empty() || socket_.size() >= sizeof address.sun_path) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, socket_.data(), socket_.size());
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + socket_.size());
  const Fd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return;
  // Never blocks: a manager that does not read must not stop the daemon.
  (void)::sendto(fd.get(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
                 reinterpret_cast<const sockaddr*>(&address), length);
}

}  // namespace tessera
