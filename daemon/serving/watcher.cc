#include "daemon/serving/watcher.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::serving {

namespace {
// Peers that connected and have not proved who they are yet.
constexpr std::size_t kMaxUnopened = 128;
}  // namespace

absl::StatusOr<std::unique_ptr<Watcher>> Watcher::Create(Services& services, Listener& listener) {
  absl::StatusOr<EventLoop> loop = EventLoop::Create();
  if (!loop.ok()) return loop.status();
  absl::StatusOr<Event> wake = Event::Create();
  if (!wake.ok()) return wake.status();
  return std::unique_ptr<Watcher>(
      new Watcher(services, listener, *std::move(loop), *std::move(wake)));
}

Watcher::Watcher(Services& services, Listener& listener, EventLoop loop, Event wake)
    : services_(services), listener_(listener), loop_(std::move(loop)), wake_(std::move(wake)) {}

Watcher::~Watcher() {
  stopping_.store(true);
  wake_.Signal();
  if (thread_.joinable()) thread_.join();
}

absl::Status Watcher::Listen(const std::string& path, unsigned mode) {
  absl::StatusOr<Fd> socket = ListenUnix(path, mode, /*non_blocking=*/true);
  if (!socket.ok()) return socket.status();
  const int fd = socket->get();
  listening_.push_back(*std::move(socket));
  return loop_.Watch(fd, [this, fd](EventLoop::Ready) { Accept(fd); });
}

void Watcher::Start() {
  thread_ = std::thread([this] { Run(); });
}

void Watcher::Post(Command command) {
  {
    MutexLock lock(mutex_);
    commands_.push_back(std::move(command));
  }
  wake_.Signal();
}

void Watcher::RunCommands() {
  std::vector<Command> commands;
  {
    MutexLock lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) std::move(command)();
}

void Watcher::Run() {
  (void)loop_.Watch(wake_.fd(), [this](EventLoop::Ready) { wake_.Drain(); });
  std::optional<absl::Duration> timeout;
  while (!stopping_.load()) {
    loop_.RunOnce(timeout);
    RunCommands();
    timeout = CollectAll();
    TellOfShrunkPools();
  }
  RunCommands();
}

std::optional<absl::Duration> Watcher::CollectAll() {
  std::optional<absl::Duration> next;
  for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
    const std::optional<Clock::Duration> again = tenant->epochs().Collect();
    if (!again.has_value()) continue;
    const absl::Duration wait = absl::FromChrono(*again);
    next = next.has_value() ? std::min(*next, wait) : wait;
  }
  return next;
}

void Watcher::TellOfShrunkPools() {
  for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
    const std::uint64_t gone = tenant->directory().extents_gone();
    if (std::exchange(told_[tenant.get()], gone) != gone) listener_.PoolShrunk(*tenant);
  }
}

// ---- sessions

void Watcher::AddSession(std::shared_ptr<cache::SessionState> session) {
  Post([this, session = std::move(session)]() mutable {
    const int fd = session->control()->wake_event().fd();
    const SessionId id = session->id();
    const absl::Status watched = loop_.Watch(fd, [this, id](EventLoop::Ready) {
      const auto it = sessions_.find(id);
      if (it == sessions_.end()) return;
      it->second.session->control()->wake_event().Drain();
      services_.absorber->Wake(it->second.session);
    });
    if (!watched.ok()) {
      services_.logger->Log(LogLevel::kError, "session cannot be watched",
                            {{"session", id.value()}, {"error", AsStringView(watched.message())}});
    }
    sessions_[id].session = std::move(session);
  });
}

void Watcher::RemoveSession(SessionId id) {
  Post([this, id] {
    const auto it = sessions_.find(id);
    if (it == sessions_.end()) return;
    loop_.Unwatch(it->second.session->control()->wake_event().fd());
    if (it->second.witness) loop_.Unwatch(it->second.witness->fd());
    Watched watched = std::move(it->second);
    sessions_.erase(it);
    SeeOff(id, std::move(watched));
  });
}

void Watcher::SeeOff(SessionId id, Watched watched) {
  if (!services_.device->description().waits_for_importers || watched.witness == nullptr) return;
  const int fd = watched.witness->fd();
  departing_[id] = std::move(watched);
  if (!loop_.Watch(fd, [this, id](EventLoop::Ready) { ServeDeparting(id); }).ok()) {
    services_.logger->Log(LogLevel::kError, "the memory of an ended session stays until exit",
                          {{"session", id.value()}});
  }
}

void Watcher::ServeDeparting(SessionId id) {
  const auto it = departing_.find(id);
  if (it == departing_.end() || it->second.witness->Discard().ok()) return;
  loop_.Unwatch(it->second.witness->fd());
  services_.node->TenantOf(id.value())->pool().ImporterGone(id);
  departing_.erase(it);
}

// ---- descriptor sockets

void Watcher::Accept(int listening) {
  for (;;) {
    Fd socket(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) return;
    if (unopened_.size() >= kMaxUnopened) continue;  // closed at once: the peer sees it and retries
    const int fd = socket.get();
    auto connection = std::make_unique<DescriptorConnection>(std::move(socket));
    if (!loop_.Watch(fd, [this, fd](EventLoop::Ready ready) { Serve(fd, ready); }).ok()) continue;
    unopened_[fd] = std::move(connection);
  }
}

void Watcher::DropUnopened(int fd) {
  loop_.Unwatch(fd);
  unopened_.erase(fd);
}

void Watcher::Serve(int fd, EventLoop::Ready) {
  const auto it = unopened_.find(fd);
  if (it == unopened_.end()) return;
  absl::StatusOr<std::shared_ptr<cache::SessionState>> session =
      it->second->ReadOpening(*services_.node);
  if (!session.ok()) {
    services_.logger->Log(LogLevel::kWarning, "descriptor connection refused",
                          {{"error", AsStringView(session.status().message())}});
    return DropUnopened(fd);
  }
  if (*session == nullptr) return;
  const SessionId id = (*session)->id();
  // AddSession was posted before the worker could know its nonce, but may not have run yet.
  RunCommands();
  const auto watched = sessions_.find(id);
  if (watched == sessions_.end()) return DropUnopened(fd);  // the session has ended meanwhile
  loop_.Unwatch(fd);
  watched->second.witness = std::move(it->second);
  unopened_.erase(it);
  (void)loop_.Watch(fd, [this, id](EventLoop::Ready ready) { ServeWitness(id, ready); });
}

void Watcher::ServeWitness(SessionId id, EventLoop::Ready) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second.witness == nullptr) return;
  Watched& watched = it->second;
  cache::Tenant* tenant = services_.node->TenantOf(id.value());
  const absl::Status status = watched.witness->ServeRequests(*tenant, *watched.session);
  if (status.ok()) return;
  loop_.Unwatch(watched.witness->fd());
  listener_.WitnessLost(id);
}

}  // namespace tessera::serving
