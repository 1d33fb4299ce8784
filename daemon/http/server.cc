#include "daemon/http/server.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/time/clock.h"
#include "daemon/base/strings.h"
#include "daemon/platform/tcp_socket.h"

namespace tessera::http {

namespace {

constexpr int kAcceptsPerTurn = 16;
constexpr std::chrono::milliseconds kAcceptPause{100};

bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const std::string& host, std::uint16_t port,
                                                      Options options) {
  absl::StatusOr<std::vector<Fd>> listening = ListenTcp(host, port);
  if (!listening.ok()) {
    const bool brackets = host.find(':') != std::string::npos;
    return absl::Status(listening.status().code(),
                        Concat("\"", brackets ? "[" : "", host, brackets ? "]" : "", ":", port,
                               "\": ", AsStringView(listening.status().message())));
  }
  absl::StatusOr<EventLoop> loop = EventLoop::Create();
  if (!loop.ok()) return loop.status();
  absl::StatusOr<Event> wake = Event::Create();
  if (!wake.ok()) return wake.status();
  std::unique_ptr<Server> server(
      new Server(std::move(options), *std::move(listening), *std::move(loop), *std::move(wake)));
  const int wake_fd = server->wake_.fd();
  absl::Status status =
      server->loop_.Watch(wake_fd, [raw = server.get()](EventLoop::Ready) { raw->wake_.Drain(); });
  if (status.ok()) status = server->WatchListening();
  if (!status.ok()) return status;
  server->Reserve();
  server->thread_ = std::thread([raw = server.get()] { raw->Run(); });
  return server;
}

Server::Server(Options options, std::vector<Fd> listening, EventLoop loop, Event wake)
    : options_(std::move(options)),
      listening_(std::move(listening)),
      port_(LocalPort(listening_[0].get())),
      loop_(std::move(loop)),
      wake_(std::move(wake)) {}

Server::~Server() {
  stopping_.store(true);
  wake_.Signal();
  if (thread_.joinable()) thread_.join();
}

void Server::Run() {
  while (!stopping_.load()) {
    std::optional<Clock::Duration> wait = DropLate();
    if (const std::optional<Clock::Duration> pause = ResumeAccepting()) {
      wait = std::min(*pause, wait.value_or(*pause));
    }
    loop_.RunOnce(wait.has_value() ? std::optional(absl::FromChrono(*wait)) : std::nullopt);
  }
}

// Accepting.

absl::Status Server::WatchListening() {
  for (const Fd& socket : listening_) {
    const int fd = socket.get();
    absl::Status status = loop_.Watch(fd, [this, fd](EventLoop::Ready) { Accept(fd); });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void Server::Accept(int listening) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Fd socket = AcceptTcp(listening);
    if (!socket.valid() && IsShortage(errno)) socket = AcceptWithoutDescriptors(listening);
    if (socket.valid()) {
      Add(std::move(socket));
    } else if (WouldBlock(errno)) {
      return;
    } else if (errno != EINTR && errno != ECONNABORTED) {
      // Whatever is wrong would be reported again at once.
      return PauseAccepting();
    }
  }
}

Fd Server::AcceptWithoutDescriptors(int listening) {
  if (!IsAwaited(listening)) {
    errno = EAGAIN;  // nobody is worth a connection
    return Fd();
  }
  reserve_.Close();
  Fd socket = AcceptTcp(listening);
  while (!socket.valid() && IsShortage(errno) && DropOne(/*any=*/false)) {
    reserve_.Close();  // taken again when the connection was closed
    socket = AcceptTcp(listening);
  }
  if (!socket.valid()) {
    const int error = errno;
    Reserve();
    errno = error;
  }
  return socket;
}

void Server::Reserve() {
  if (!reserve_.valid()) reserve_ = Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void Server::PauseAccepting() {
  for (const Fd& socket : listening_) loop_.Unwatch(socket.get());
  accept_again_ = options_.clock->Now() + kAcceptPause;
}

std::optional<Clock::Duration> Server::ResumeAccepting() {
  if (!accept_again_.has_value()) return std::nullopt;
  const Clock::Duration wait = *accept_again_ - options_.clock->Now();
  if (wait > Clock::Duration::zero()) return wait;
  accept_again_.reset();
  if (WatchListening().ok()) return std::nullopt;
  PauseAccepting();
  return kAcceptPause;
}

void Server::Add(Fd socket) {
  if (connections_.size() >= options_.max_connections) DropOne(/*any=*/true);
  const int fd = socket.get();
  const auto watch = [this, fd](EventLoop::Ready ready) { Serve(fd, ready); };
  if (!loop_.Watch(fd, watch).ok()) return;
  const Clock::TimePoint now = options_.clock->Now();
  Connection& connection = connections_[fd];
  connection = {
      .socket = std::move(socket), .accepted = now, .deadline = now + options_.request_time};
  // Most peers have sent their request by now.
  Read(connection);
}

// Serving.

void Server::Serve(int fd, EventLoop::Ready ready) {
  const auto found = connections_.find(fd);
  if (found == connections_.end()) return;
  Connection& connection = found->second;
  switch (connection.state) {
    case Connection::State::kReading:
      return Read(connection);
    case Connection::State::kWriting:
      if (ready.writable || ready.hung_up) Write(connection);
      return;
    case Connection::State::kAnswered:
      return Discard(connection);
  }
}

void Server::Read(Connection& connection) {
  const int fd = connection.socket.get();
  char buffer[kMaxRequestBytes];
  const ssize_t n = ::recv(fd, buffer, sizeof buffer - connection.received.size(), 0);
  if (n < 0 && (WouldBlock(errno) || errno == EINTR)) return;
  if (n <= 0) return Close(fd);
  connection.received.append(buffer, static_cast<std::size_t>(n));
  const ParsedRequest parsed = ParseRequest(connection.received);
  if (parsed.state != ParsedRequest::State::kIncomplete) Answer(connection, parsed);
}

void Server::Answer(Connection& connection, const ParsedRequest& parsed) {
  const Clock::TimePoint begin = options_.clock->Now();
  connection.answer = Serialize(AnswerOf(parsed), parsed.request, absl::Now());
  connection.deadline += options_.clock->Now() - begin;
  connection.state = Connection::State::kWriting;
  connection.received.clear();
  Write(connection);
}

Response Server::AnswerOf(const ParsedRequest& parsed) const {
  if (parsed.state == ParsedRequest::State::kRefused) {
    return TextResponse(parsed.refusal, parsed.why);
  }
  const auto page = std::ranges::find(options_.pages, parsed.request.path, &Page::path);
  if (page == options_.pages.end()) return TextResponse(404, "no such page; / lists all pages");
  if (parsed.request.method == Method::kOther) return TextResponse(405, "use GET or HEAD");
  return page->answer();
}

void Server::Write(Connection& connection) {
  const int fd = connection.socket.get();
  while (connection.sent < connection.answer.size()) {
    const ssize_t n = ::send(fd, connection.answer.data() + connection.sent,
                             connection.answer.size() - connection.sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && WouldBlock(errno)) return loop_.AwaitRoomOnly(fd);
    if (n < 0) return Close(fd);
    connection.sent += static_cast<std::size_t>(n);
  }
  AwaitClose(connection);
}

// If a socket is closed while received bytes are unread, the kernel resets the connection, and the
// peer may lose the answer. So the peer closes first.
void Server::AwaitClose(Connection& connection) {
  const int fd = connection.socket.get();
  connection.state = Connection::State::kAnswered;
  connection.answer = {};
  ::shutdown(fd, SHUT_WR);
  loop_.AwaitData(fd);
  Discard(connection);
}

void Server::Discard(Connection& connection) {
  const int fd = connection.socket.get();
  char buffer[kMaxRequestBytes];
  const ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
  if (n == 0 || (n < 0 && !WouldBlock(errno) && errno != EINTR)) Close(fd);
}

// Closing.

void Server::Close(int fd) {
  loop_.Unwatch(fd);
  connections_.erase(fd);
  Reserve();
}

bool Server::DropOne(bool any) {
  const auto first = std::ranges::min_element(connections_, {}, [](const auto& entry) {
    return std::pair(entry.second.state, entry.second.accepted);
  });
  if (first == connections_.end()) return false;
  if (first->second.state == Connection::State::kWriting && !any) return false;
  Close(first->first);
  return true;
}

std::optional<Clock::Duration> Server::DropLate() {
  const Clock::TimePoint now = options_.clock->Now();
  std::vector<int> late;
  std::optional<Clock::Duration> next;
  for (const auto& [fd, connection] : connections_) {
    const Clock::Duration left = connection.deadline - now;
    if (left <= Clock::Duration::zero()) {
      late.push_back(fd);
    } else {
      next = std::min(left, next.value_or(left));
    }
  }
  for (const int fd : late) Close(fd);
  return next;
}

}  // namespace tessera::http
