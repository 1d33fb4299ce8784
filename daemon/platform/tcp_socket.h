// TCP sockets that listen and are accepted, without blocking.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/platform/fd.h"

namespace tessera {

// Listens on every address that `host` stands for and this machine has, all on one port; port 0
// takes any free port. "::" includes IPv4. ALREADY_EXISTS if the port is in use, NOT_FOUND if the
// name is unknown, else the system's error.
absl::StatusOr<std::vector<Fd>> ListenTcp(const std::string& host, std::uint16_t port);

// The local port of a socket; 0 if it has none.
std::uint16_t LocalPort(int socket);

// Whether a connection waits to be accepted. Without free descriptors, accepting cannot tell.
bool IsAwaited(int listening);

// Does not hold back small messages until earlier ones are acknowledged.
void SendAtOnce(int socket);

// Lets the system close a connection whose peer has been gone for `limit` (at least 5 s): its host
// vanished, or the network is cut. A peer that is only silent, or stopped, still answers probes.
void SetPeerLimit(int socket, std::chrono::seconds limit);

// Accepts one connection; an invalid Fd and errno (EAGAIN: none is waiting) if that fails.
Fd AcceptTcp(int listening);

}  // namespace tessera
