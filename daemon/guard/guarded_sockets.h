// GuardedSockets has the guard of each connection that the daemon has accepted for gRPC.
//
// gRPC reads a plain connection with recvmsg, and the bytes of a TLS connection with SSL_read,
// after SSL_do_handshake. guarded_sockets.cc defines them, for all of the process: the linker
// prefers a program's function to a library's. So each byte is checked before gRPC sees it, without
// a copy or another thread. A proxy in front of gRPC would cost a call two copies and four context
// switches.
//
// A connection that must wait (FrameGuard::MustWait) looks empty to gRPC: recvmsg says EAGAIN. To
// gRPC, which asks epoll for changes only, Resume makes the bytes look new; so epoll_ctl is
// defined, too.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/guard/frame_guard.h"

namespace tessera {

// One connection. Thread-safe.
class GuardedConnection {
 public:
  struct Options {
    FrameGuard::Limits limits;
    Registrar* registrar;
    const Clock* clock;
    bool tls = false;      // the guard checks what SSL_read returns
    bool trusted = false;  // needs no session: the operator's
    // Called once, with the reason, when the guard cuts the connection.
    std::function<void(const absl::Status&)> on_cut;
    // The connection begins to wait: call GuardedSockets::Resume until it returns 0.
    std::function<void()> on_wait;
  };
  explicit GuardedConnection(Options options)
      : options_(std::move(options)),
        accepted_(options_.clock->Now()),
        guard_(options_.limits, *options_.registrar),
        known_(options_.trusted) {}

  // False: the connection must be cut.
  bool Take(std::span<const std::uint8_t> bytes);
  // True: nothing may be read now (FrameGuard::MustWait). The connection waits until Resume.
  bool BeginWait();
  // False: it must wait on. Otherwise epoll reports the socket's bytes once more.
  bool Resume(int socket);
  bool waits() const { return waits_.load(); }
  // The socket's events go to this epoll instance.
  void SetPoll(int epoll, const epoll_event& event);
  bool tls() const { return options_.tls; }
  bool speaks_http2() {
    MutexLock lock(mutex_);
    return guard_.speaks_http2();
  }
  Clock::TimePoint accepted() const { return accepted_; }
  // Whether the peer has shown a token or a session key, or needs none.
  bool known() const { return known_.load(); }
  bool cut() const { return cut_.load(); }
  // Refuses further bytes. Idempotent.
  void Cut(const absl::Status& why);
  // The socket is closed. Nothing of the options is used any more.
  void Retire();

 private:
  const Options options_;
  const Clock::TimePoint accepted_;
  Mutex mutex_;
  FrameGuard guard_ TESSERA_GUARDED_BY(mutex_);
  std::atomic<bool> known_;
  std::atomic<bool> cut_{false};
  std::atomic<bool> waits_{false};
  int epoll_ TESSERA_GUARDED_BY(mutex_) = -1;  // -1: unknown
  epoll_event event_ TESSERA_GUARDED_BY(mutex_){};
};

// Thread-safe.
class GuardedSockets {
 public:
  // Time in which a peer must show a token or a session key.
  static constexpr std::chrono::seconds kUnknownLimit{10};

  // The table of this process. It is the process's, because descriptors are, and because recvmsg
  // has no other way to find it.
  static GuardedSockets& OfProcess();

  // Guards `socket` from now on. It replaces a closed socket that had the same number.
  void Add(int socket, std::shared_ptr<GuardedConnection> connection);
  // nullptr: the socket is not guarded.
  std::shared_ptr<GuardedConnection> Find(int socket);

  struct Counts {
    std::size_t all = 0;
    std::size_t unknown = 0;
  };
  // Cuts connections that stayed unknown for too long, and forgets closed ones.
  Counts Sweep(Clock::TimePoint now);
  // Cuts the unknown connection that is the oldest. False: there is none.
  bool CutOldestUnknown();
  // Lets connections that wait read on, if they may. Returns how many must wait on.
  std::size_t Resume();
  bool empty() const;
  // Call it when gRPC has shut down: retires all connections.
  void Clear();

  // Bytes that the guards have seen. 0 after a message has arrived means that this gRPC reads in
  // another way, and nothing is guarded.
  std::uint64_t bytes_seen() const { return bytes_seen_.load(std::memory_order_relaxed); }
  void CountBytes(std::size_t bytes) { bytes_seen_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  struct Entry {
    std::uint64_t cookie = 0;  // of the socket, whose number may be used again
    std::shared_ptr<GuardedConnection> connection;
  };
  void Cut(int socket, const Entry& entry, const absl::Status& why);

  mutable Mutex mutex_;
  std::unordered_map<int, Entry> entries_ TESSERA_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> bytes_seen_{0};
  std::atomic<bool> any_{false};  // so that other processes' reads cost nothing
};

}  // namespace tessera
