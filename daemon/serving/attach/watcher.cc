#include "daemon/serving/attach/watcher.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::serving {

namespace {
// Limits for peers that have not sent a valid opening: their number, and the time they have.
constexpr std::size_t kMaxUnopened = 128;
constexpr std::chrono::seconds kOpeningLimit{2};
constexpr char kNoOpening[] = "no descriptor opening within 2 s";
// Connections accepted from one socket before others get their turn.
constexpr int kAcceptsPerTurn = 16;
// Pause in accepting when descriptors have run out.
constexpr std::chrono::milliseconds kAcceptPause{100};

std::optional<absl::Duration> Sooner(std::optional<absl::Duration> a,
                                     std::optional<absl::Duration> b) {
  if (!a.has_value()) return b;
  return b.has_value() ? std::min(*a, *b) : a;
}
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
    : services_(services),
      listener_(listener),
      pulse_(services.heartbeats->Add("event loop")),
      loop_(std::move(loop)),
      wake_(std::move(wake)) {}

Watcher::~Watcher() { Stop(); }

void Watcher::Stop() {
  stopping_.store(true);
  wake_.Signal();
  if (thread_.joinable()) thread_.join();
  pulse_.End();
}

absl::Status Watcher::Listen(const std::string& path, unsigned mode,
                             const Published<PeerRules>& peers) {
  peers_ = &peers;
  absl::StatusOr<Fd> socket = ListenUnix(path, mode, /*non_blocking=*/true);
  if (!socket.ok()) return socket.status();
  const int fd = socket->get();
  listening_.push_back(*std::move(socket));
  return WatchListening(fd);
}

absl::Status Watcher::WatchListening(int fd) {
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
    pulse_.Beat();
    loop_.RunOnce(Sooner(timeout, absl::FromChrono(kHeartbeatInterval)));
    RunCommands();
    timeout = Sooner(Sooner(CollectAll(), SweepPrefixes()),
                     Sooner(Sooner(DropLateOpenings(), ResumeAccepting()), ResumeCompaction()));
    NotifyShrunkPools();
  }
  RunCommands();
}

std::optional<absl::Duration> Watcher::CollectAll() {
  std::optional<absl::Duration> next;
  for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
    const std::optional<Clock::Duration> again = tenant->epochs().Collect();
    if (!again.has_value()) continue;
    next = Sooner(next, absl::FromChrono(*again));
  }
  return next;
}

std::optional<absl::Duration> Watcher::SweepPrefixes() {
  std::optional<absl::Duration> next;
  for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
    const std::optional<Clock::Duration> again = tenant->prefixes().Sweep();
    if (again.has_value()) next = Sooner(next, absl::FromChrono(*again));
  }
  return next;
}

std::optional<absl::Duration> Watcher::ResumeCompaction() {
  const std::optional<Clock::Duration> again = services_.compactor->Resume();
  if (!again.has_value()) return std::nullopt;
  return absl::FromChrono(*again);
}

void Watcher::NotifyShrunkPools() {
  for (const std::unique_ptr<cache::Tenant>& tenant : services_.node->tenants()) {
    const std::uint64_t gone = tenant->directory().extents_gone();
    if (std::exchange(told_[tenant.get()], gone) != gone) listener_.PoolExtentsRemoved(*tenant);
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
      services_.logger->Log(LogLevel::kError, "cannot watch session",
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
    AwaitImporterExit(id, std::move(watched));
  });
}

void Watcher::AwaitImporterExit(SessionId id, Watched watched) {
  if (!services_.device->description().waits_for_importers || watched.witness == nullptr) return;
  const int fd = watched.witness->fd();
  departing_[id] = std::move(watched);
  if (!loop_.Watch(fd, [this, id](EventLoop::Ready) { DiscardUntilClosed(id); }).ok()) {
    services_.logger->Log(LogLevel::kError,
                          "memory of an ended session cannot be freed before the daemon exits",
                          {{"session", id.value()}});
  }
}

void Watcher::DiscardUntilClosed(SessionId id) {
  const auto it = departing_.find(id);
  if (it == departing_.end() || it->second.witness->Discard().ok()) return;
  loop_.Unwatch(it->second.witness->fd());
  services_.node->TenantOf(id.value())->pool().ImporterGone(id);
  departing_.erase(it);
}

// ---- descriptor sockets

void Watcher::Accept(int listening) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Fd socket(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (IsShortage(errno)) PauseAccepting(ErrnoStatus("accepting a descriptor connection"));
      return;
    }
    if (absl::Status status = CheckPeer(socket.get(), *peers_->Get()); !status.ok()) {
      LogRefused(status);
      continue;
    }
    if (unopened_.size() >= kMaxUnopened) {
      // Drop the peer that has been silent the longest: it is the least likely to be a worker.
      RejectUnopened(
          OldestUnopened(),
          absl::ResourceExhaustedError(Concat(
              unopened_.size(), " connections have not sent their opening; the limit is reached")));
    }
    const int fd = socket.get();
    auto connection = std::make_unique<DescriptorConnection>(std::move(socket));
    if (!loop_.Watch(fd, [this, fd](EventLoop::Ready) { Serve(fd); }).ok()) continue;
    unopened_[fd] = {std::move(connection), services_.clock->Now() + kOpeningLimit};
  }
}

void Watcher::PauseAccepting(const absl::Status& why) {
  LogRefused(why);
  for (const Fd& listening : listening_) loop_.Unwatch(listening.get());
  accept_again_ = services_.clock->Now() + kAcceptPause;
}

std::optional<absl::Duration> Watcher::ResumeAccepting() {
  if (!accept_again_.has_value()) return std::nullopt;
  const Clock::Duration wait = *accept_again_ - services_.clock->Now();
  if (wait > Clock::Duration::zero()) return absl::FromChrono(wait);
  accept_again_.reset();
  for (const Fd& listening : listening_) {
    if (absl::Status status = WatchListening(listening.get()); !status.ok()) {
      PauseAccepting(status);
      return absl::FromChrono(kAcceptPause);
    }
  }
  return std::nullopt;
}

int Watcher::OldestUnopened() const {
  return std::min_element(
             unopened_.begin(), unopened_.end(),
             [](const auto& a, const auto& b) { return a.second.until < b.second.until; })
      ->first;
}

std::optional<absl::Duration> Watcher::DropLateOpenings() {
  while (!unopened_.empty()) {
    const int oldest = OldestUnopened();
    const Clock::Duration wait = unopened_[oldest].until - services_.clock->Now();
    if (wait > Clock::Duration::zero()) return absl::FromChrono(wait);
    RejectUnopened(oldest, absl::DeadlineExceededError(kNoOpening));
  }
  return std::nullopt;
}

void Watcher::LogRefused(const absl::Status& why) {
  const std::optional<std::uint64_t> unsaid = refusals_.Say(services_.clock->Now());
  if (!unsaid.has_value()) return;
  services_.logger->Log(LogLevel::kWarning, "descriptor connection refused",
                        {{"error", AsStringView(why.message())}, {"like_this_before", *unsaid}});
}

void Watcher::RejectUnopened(int fd, const absl::Status& why) {
  Serve(fd);  // its opening may have arrived by now
  if (!unopened_.contains(fd)) return;
  LogRefused(why);
  DropUnopened(fd);
}

void Watcher::DropUnopened(int fd) {
  loop_.Unwatch(fd);
  unopened_.erase(fd);
}

void Watcher::Serve(int fd) {
  const auto it = unopened_.find(fd);
  if (it == unopened_.end()) return;
  absl::StatusOr<std::shared_ptr<cache::SessionState>> session =
      it->second.connection->ReadOpening(*services_.node);
  if (!session.ok()) {
    LogRefused(session.status());
    return DropUnopened(fd);
  }
  if (*session == nullptr) return;
  const SessionId id = (*session)->id();
  // AddSession was posted before the worker received its nonce, but may not have run yet.
  RunCommands();
  const auto watched = sessions_.find(id);
  if (watched == sessions_.end()) return DropUnopened(fd);  // the session has ended in the meantime
  loop_.Unwatch(fd);
  watched->second.witness = std::move(it->second.connection);
  unopened_.erase(it);
  (void)loop_.Watch(fd, [this, id](EventLoop::Ready ready) { ServeWitness(id, ready); });
}

void Watcher::ServeWitness(SessionId id, EventLoop::Ready ready) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second.witness == nullptr) return;
  Watched& watched = it->second;
  using Next = DescriptorConnection::Next;
  absl::StatusOr<Next> next = Next::kStaging;
  if (!watched.awaits_staging) {
    cache::Tenant* tenant = services_.node->TenantOf(id.value());
    next = watched.witness->ServeRequests(*tenant, *watched.session);
  }
  // A peer that has hung up may have requests left, but gets no answer to what it must wait for.
  const bool goes_on = next.ok() && (*next == Next::kRequests || !ready.hung_up);
  const int fd = watched.witness->fd();
  if (!goes_on) {
    loop_.Unwatch(fd);
    return listener_.DescriptorSocketClosed(id);
  }
  if (*next == Next::kRoom && !ready.writable) loop_.AwaitRoom(fd);
  if (*next == Next::kRequests && ready.writable) loop_.AwaitData(fd);
  if (*next == Next::kStaging && !std::exchange(watched.awaits_staging, true)) {
    loop_.AwaitHangUp(fd);
    CreateStaging(watched.session);
  }
}

void Watcher::CreateStaging(const std::shared_ptr<cache::SessionState>& session) {
  const SessionId id = session->id();
  services_.scheduler->Submit({.name = "create-staging",
                               .priority = JobPriority::kTails,
                               .tenant = session->tenant_id(),
                               .owner = id.value()},
                              [this, id, session] {
                                absl::Status created = session->CreateStaging();
                                Post([this, id, created] { StagingCreated(id, created); });
                              });
}

void Watcher::StagingCreated(SessionId id, const absl::Status& created) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return;  // the session has ended in the meantime
  Watched& watched = it->second;
  watched.awaits_staging = false;
  if (watched.witness->AnswerStaging(created, *watched.session).ok()) {
    return loop_.AwaitData(watched.witness->fd());
  }
  loop_.Unwatch(watched.witness->fd());
  listener_.DescriptorSocketClosed(id);
}

}  // namespace tessera::serving
