// The environment in which a service manager such as systemd starts the daemon.
#pragma once

#include <chrono>
#include <string>

namespace tessera::config {

struct ServiceManagerEnvironment {
  std::string notify_socket;             // NOTIFY_SOCKET; empty: none
  std::chrono::microseconds watchdog{};  // WATCHDOG_USEC, if it is meant for this process; 0: none
};

// Reads the environment. A value that is not a number counts as absent.
ServiceManagerEnvironment ReadServiceManagerEnvironment();

}  // namespace tessera::config
