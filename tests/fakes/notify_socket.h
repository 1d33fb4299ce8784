// Plays a service manager: the socket that NOTIFY_SOCKET names.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "daemon/platform/fd.h"

namespace tessera::fakes {

class NotifySocket {
 public:
  // `name`: a path, or "@" and an abstract name. Empty: a new path.
  explicit NotifySocket(const std::string& name = "") : name_(name) {
    if (name.empty()) {
      std::string folder = testing::TempDir() + "notify-XXXXXX";
      EXPECT_NE(::mkdtemp(folder.data()), nullptr);
      folder_ = folder;
      name_ = folder + "/socket";
    }
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name_.data(), name_.size());
    if (name_[0] == '@') address.sun_path[0] = '\0';
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name_.size());
    EXPECT_EQ(::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
  }
  ~NotifySocket() {
    if (folder_.empty()) return;
    ::unlink(name_.c_str());
    ::rmdir(folder_.c_str());
  }
  NotifySocket(const NotifySocket&) = delete;
  NotifySocket& operator=(const NotifySocket&) = delete;

  const std::string& name() const { return name_; }

  // The next message; empty if none comes in time.
  std::string Receive(int timeout_ms = 30'000) const {
    pollfd ready = {socket_.get(), POLLIN, 0};
    if (::poll(&ready, 1, timeout_ms) != 1) return {};
    char message[4096];
    const ssize_t size = ::recv(socket_.get(), message, sizeof message, 0);
    return size <= 0 ? std::string() : std::string(message, static_cast<std::size_t>(size));
  }

 private:
  std::string name_;
  std::string folder_;
  const Fd socket_{::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

}  // namespace tessera::fakes
