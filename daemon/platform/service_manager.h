// ServiceManager tells systemd, or another manager with the same protocol (sd_notify), what the
// daemon does: one datagram per message to the socket that NOTIFY_SOCKET names.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>

namespace tessera {

// Without a socket, nothing is sent. A manager that does not receive is not an error. Thread-safe.
class ServiceManager {
 public:
  // `socket` is a path, or an abstract name that begins with "@"; empty: no manager.
  explicit ServiceManager(std::string socket) : socket_(std::move(socket)) {}

  void Ready() const { Send("READY=1\nSTATUS=serving"); }
  // Ready must follow.
  void Reloading() const;
  // `limit` is the time until the process ends at the latest.
  void Stopping(std::chrono::microseconds limit) const;
  // The process is well. Due at least once per watchdog interval.
  void Alive() const { Send("WATCHDOG=1"); }

 private:
  void Send(std::string_view message) const;
  const std::string socket_;
};

}  // namespace tessera
