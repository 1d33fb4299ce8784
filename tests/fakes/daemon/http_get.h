// One HTTP request over loopback.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "daemon/platform/fd.h"

namespace tessera::fakes {

// Connects and sends `request` as it is. An invalid Fd if that fails.
inline Fd HttpSend(std::uint16_t port, const std::string& request) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) !=
          static_cast<ssize_t>(request.size())) {
    socket.Close();
  }
  return socket;
}

// Sends `request` as it is, and returns everything up to the end of the connection.
inline std::string HttpExchange(std::uint16_t port, const std::string& request) {
  const Fd socket = HttpSend(port, request);
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = ::recv(socket.get(), buffer, sizeof buffer, 0)) > 0;) {
    answer.append(buffer, n);
  }
  return answer;
}

// Returns the body of a page, or an empty string on failure.
inline std::string HttpGet(std::uint16_t port, const std::string& path) {
  const std::string answer =
      HttpExchange(port, "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const std::size_t body = answer.find("\r\n\r\n");
  return body == std::string::npos ? std::string() : answer.substr(body + 4);
}

}  // namespace tessera::fakes
