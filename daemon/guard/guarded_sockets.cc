#include "daemon/guard/guarded_sockets.h"

#include <dlfcn.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera {

namespace {

// A number that no other socket of this machine has had; 0: not a socket.
std::uint64_t CookieOf(int socket) {
  std::uint64_t cookie = 0;
  socklen_t size = sizeof cookie;
  return ::getsockopt(socket, SOL_SOCKET, SO_COOKIE, &cookie, &size) == 0 ? cookie : 0;
}

}  // namespace

bool GuardedConnection::Take(std::span<const std::uint8_t> bytes) {
  GuardedSockets::OfProcess().CountBytes(bytes.size());
  absl::Status status;
  {
    MutexLock lock(mutex_);
    if (cut()) return false;
    status = guard_.Take(bytes, options_.clock->Now());
    if (guard_.known()) known_.store(true);
    // Others of the tenant may have at once what this connection had.
    if (!status.ok()) guard_.Release();
  }
  if (!status.ok()) Cut(status);
  return status.ok();
}

bool GuardedConnection::BeginWait() {
  {
    MutexLock lock(mutex_);
    if (cut() || !guard_.MustWait()) return false;
    if (waits_.exchange(true)) return true;
  }
  if (options_.on_wait) options_.on_wait();
  return true;
}

bool GuardedConnection::Resume(int socket) {
  MutexLock lock(mutex_);
  if (!cut() && guard_.MustWait()) return false;
  waits_.store(false);
  // A change to what it was makes epoll report the events that are there once more.
  if (epoll_ >= 0) (void)::syscall(SYS_epoll_ctl, epoll_, EPOLL_CTL_MOD, socket, &event_);
  return true;
}

void GuardedConnection::SetPoll(int epoll, const epoll_event& event) {
  MutexLock lock(mutex_);
  epoll_ = epoll;
  event_ = event;
}

void GuardedConnection::Cut(const absl::Status& why) {
  if (!cut_.exchange(true) && options_.on_cut) options_.on_cut(why);
}

void GuardedConnection::Retire() {
  cut_.store(true);
  MutexLock lock(mutex_);
  guard_.Release();
}

GuardedSockets& GuardedSockets::OfProcess() {
  static GuardedSockets* const table =
      new GuardedSockets;  // never destroyed: threads may read late
  return *table;
}

void GuardedSockets::Add(int socket, std::shared_ptr<GuardedConnection> connection) {
  const std::uint64_t cookie = CookieOf(socket);
  MutexLock lock(mutex_);
  Entry& entry = entries_[socket];
  if (entry.connection != nullptr) entry.connection->Retire();
  entry = {.cookie = cookie, .connection = std::move(connection)};
  any_.store(true);
}

std::shared_ptr<GuardedConnection> GuardedSockets::Find(int socket) {
  if (!any_.load(std::memory_order_relaxed)) return nullptr;
  MutexLock lock(mutex_);
  const auto found = entries_.find(socket);
  if (found == entries_.end()) return nullptr;
  if (found->second.cookie == CookieOf(socket)) return found->second.connection;
  found->second.connection->Retire();
  entries_.erase(found);
  return nullptr;
}

std::size_t GuardedSockets::Resume() {
  std::size_t waiting = 0;
  MutexLock lock(mutex_);
  for (const auto& [socket, entry] : entries_) {
    if (!entry.connection->waits()) continue;
    // A closed socket's connection waits for nothing, until Sweep finds it.
    if (CookieOf(socket) == entry.cookie && !entry.connection->Resume(socket)) ++waiting;
  }
  return waiting;
}

void GuardedSockets::Clear() {
  MutexLock lock(mutex_);
  for (const auto& [socket, entry] : entries_) entry.connection->Retire();
  entries_.clear();
}

bool GuardedSockets::empty() const {
  MutexLock lock(mutex_);
  return entries_.empty();
}

// The socket is still the one of the entry: Add, which follows each accept, waits for the lock.
void GuardedSockets::Cut(int socket, const Entry& entry, const absl::Status& why) {
  entry.connection->Cut(why);
  (void)::shutdown(socket, SHUT_RDWR);  // gRPC reads the end and closes
}

GuardedSockets::Counts GuardedSockets::Sweep(Clock::TimePoint now) {
  Counts counts;
  MutexLock lock(mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    const auto& [socket, entry] = *it;
    if (CookieOf(socket) != entry.cookie) {
      entry.connection->Retire();
      it = entries_.erase(it);
      continue;
    }
    ++counts.all;
    if (!entry.connection->known()) {
      ++counts.unknown;
      if (now - entry.connection->accepted() > kUnknownLimit) {
        Cut(socket, entry,
            absl::DeadlineExceededError(Concat("no session within ", kUnknownLimit.count(), " s")));
      }
    }
    ++it;
  }
  return counts;
}

bool GuardedSockets::CutOldestUnknown() {
  MutexLock lock(mutex_);
  auto oldest = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    const GuardedConnection& connection = *it->second.connection;
    if (connection.known() || connection.cut()) continue;
    if (CookieOf(it->first) != it->second.cookie) continue;
    if (oldest == entries_.end() || connection.accepted() < oldest->second.connection->accepted()) {
      oldest = it;
    }
  }
  if (oldest == entries_.end()) return false;
  Cut(oldest->first, oldest->second,
      absl::ResourceExhaustedError("too many connections without a session"));
  return true;
}

namespace {

// The frame with which a server of HTTP/2 begins: length 0, type 4, no flags, stream 0.
constexpr std::array<std::uint8_t, 9> kEmptySettings = {0, 0, 0, 4, 0, 0, 0, 0, 0};

// The TLS connection whose bytes this thread has read last. gRPC decrypts what it has read before
// it reads anything else.
thread_local std::weak_ptr<GuardedConnection> t_read_last;

bool TakeAll(GuardedConnection& connection, const iovec* parts, std::size_t left) {
  for (; left > 0; ++parts) {
    const std::size_t count = std::min(left, parts->iov_len);
    if (!connection.Take({static_cast<const std::uint8_t*>(parts->iov_base), count})) return false;
    left -= count;
  }
  return true;
}

// The connection of a TLS object is found at its handshake, and kept in the object.
int ConnectionIndex() {
  static const int index = SSL_get_ex_new_index(
      0, nullptr, nullptr, nullptr, [](void*, void* connection, CRYPTO_EX_DATA*, int, long, void*) {
        delete static_cast<std::shared_ptr<GuardedConnection>*>(connection);
      });
  return index;
}

GuardedConnection* ConnectionOf(SSL* ssl) {
  auto* kept =
      static_cast<std::shared_ptr<GuardedConnection>*>(SSL_get_ex_data(ssl, ConnectionIndex()));
  if (kept != nullptr) return kept->get();
  if (std::shared_ptr<GuardedConnection> last = t_read_last.lock()) {
    kept = new std::shared_ptr<GuardedConnection>(std::move(last));
    (void)SSL_set_ex_data(ssl, ConnectionIndex(), kept);
  }
  return kept == nullptr ? nullptr : kept->get();
}

}  // namespace
}  // namespace tessera

// ---- what gRPC calls instead of the libraries' functions

extern "C" {

ssize_t recvmsg(int socket, msghdr* message, int flags) {
  const std::shared_ptr<tessera::GuardedConnection> connection =
      tessera::GuardedSockets::OfProcess().Find(socket);
  if (connection != nullptr && connection->BeginWait()) {
    errno = EAGAIN;
    return -1;
  }
  const auto count = static_cast<ssize_t>(::syscall(SYS_recvmsg, socket, message, flags));
  if (count <= 0 || connection == nullptr) return count;
  if (connection->tls()) {
    tessera::t_read_last = connection;
    return count;
  }
  if (tessera::TakeAll(*connection, message->msg_iov, static_cast<std::size_t>(count))) {
    return count;
  }
  // A client that speaks TLS, or HTTP/1, tells its user so if it gets an answer of HTTP/2.
  if (!connection->speaks_http2()) {
    (void)::send(socket, tessera::kEmptySettings.data(), tessera::kEmptySettings.size(),
                 MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  (void)::shutdown(socket, SHUT_RDWR);
  errno = ECONNRESET;
  return -1;
}

int epoll_ctl(int epoll, int operation, int socket, epoll_event* event) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_epoll_ctl, epoll, operation, socket, event));
  if (result != 0 || operation == EPOLL_CTL_DEL) return result;
  const std::shared_ptr<tessera::GuardedConnection> connection =
      tessera::GuardedSockets::OfProcess().Find(socket);
  if (connection != nullptr) connection->SetPoll(epoll, *event);
  return result;
}

int SSL_do_handshake(SSL* ssl) {
  using Function = int (*)(SSL*);
  static const auto original = reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "SSL_do_handshake"));
  if (SSL_is_server(ssl) != 0) (void)tessera::ConnectionOf(ssl);
  return original(ssl);
}

int SSL_read(SSL* ssl, void* buffer, int size) {
  if (size < 0) return -1;
  std::size_t count = 0;
  if (SSL_read_ex(ssl, buffer, static_cast<std::size_t>(size), &count) != 1) return 0;
  if (SSL_is_server(ssl) == 0) return static_cast<int>(count);
  tessera::GuardedConnection* const connection = tessera::ConnectionOf(ssl);
  const bool good =
      connection != nullptr && connection->Take({static_cast<const std::uint8_t*>(buffer), count});
  return good ? static_cast<int>(count) : -1;  // gRPC closes a connection that cannot be read
}

}  // extern "C"
