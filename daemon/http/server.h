// Server: serves a few pages over HTTP/1.1 on one thread, whatever its peers do.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/http/response.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/fd.h"

namespace tessera::http {

struct Page {
  std::string path;  // exact, e.g. "/metrics"
  // Called on the server's thread, for GET and HEAD. While it runs, nothing else is answered.
  std::function<Response()> answer;
};

// One request per connection. A peer has `request_time` to send its request and take the answer;
// the time that the page needs does not count. At `max_connections`, the oldest connection that has
// no complete request is dropped, so silent peers cannot block others. When the process has run out
// of descriptors, it still answers one connection at a time.
class Server {
 public:
  struct Options {
    std::vector<Page> pages;
    const Clock* clock = nullptr;
    std::size_t max_connections = 32;
    Clock::Duration request_time = std::chrono::seconds(2);
  };

  // Listens on the addresses of `host`; port 0 takes any free port. ALREADY_EXISTS if the port is
  // in use, else the system's error; both name the address.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const std::string& host, std::uint16_t port,
                                                       Options options);
  // Drops all connections and waits for a page that is being answered.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::uint16_t port() const { return port_; }

 private:
  struct Connection {
    // In the order in which connections are dropped to make room.
    enum class State : std::uint8_t {
      kAnswered,  // waits for the peer to close, so that the kernel does not discard the answer
      kReading,
      kWriting,
    };
    Fd socket;
    State state = State::kReading;
    Clock::TimePoint accepted{};
    Clock::TimePoint deadline{};
    std::string received{};
    std::string answer{};
    std::size_t sent = 0;
  };

  Server(Options options, std::vector<Fd> listening, EventLoop loop, Event wake);
  void Run();
  absl::Status WatchListening();
  void Accept(int listening);
  // Accepts although the process has no free descriptor; an invalid Fd if that is impossible.
  Fd AcceptWithoutDescriptors(int listening);
  void Add(Fd socket);
  void Serve(int fd, EventLoop::Ready ready);
  void Read(Connection& connection);
  void Answer(Connection& connection, const ParsedRequest& parsed);
  Response AnswerOf(const ParsedRequest& parsed) const;
  void Write(Connection& connection);
  void AwaitClose(Connection& connection);
  void Discard(Connection& connection);
  void Close(int fd);
  // Closes the connection that is worth the least, if it has no complete request or is answered, or
  // if `any`. Returns whether it did.
  bool DropOne(bool any);
  void Reserve();
  void PauseAccepting();
  // Each does its due work and returns the time until it must run again; nullopt: no timer needed.
  std::optional<Clock::Duration> DropLate();
  std::optional<Clock::Duration> ResumeAccepting();

  const Options options_;
  const std::vector<Fd> listening_;
  const std::uint16_t port_;
  EventLoop loop_;
  Event wake_;
  Fd reserve_;  // closed to accept a connection when the process has no free descriptor
  std::optional<Clock::TimePoint> accept_again_;
  std::unordered_map<int, Connection> connections_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace tessera::http
