#include "daemon/serving/attach/acceptor.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/tcp_socket.h"

namespace tessera::serving {

namespace {
// Pause before the next attempt when descriptors have run out.
constexpr int kAcceptPauseMs = 100;
// Pause before the next look at connections that must wait with reading.
constexpr int kResumePauseMs = 2;
constexpr int kTickMs = 1000;
constexpr int kLastTicks = 5;
// Connections of one address before the others get their turn.
constexpr int kAcceptsPerTurn = 16;
}  // namespace

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Start(Options options) {
  absl::StatusOr<Event> stop = Event::Create();
  if (!stop.ok()) return stop.status();
  absl::StatusOr<Event> waits = Event::Create();
  if (!waits.ok()) return waits.status();
  std::unique_ptr<Acceptor> acceptor(
      new Acceptor(std::move(options), *std::move(stop), *std::move(waits)));
  acceptor->thread_ = std::thread([raw = acceptor.get()] { raw->Run(); });
  return acceptor;
}

Acceptor::~Acceptor() {
  stop_.Signal();
  if (thread_.joinable()) thread_.join();
}

bool Acceptor::Wait(std::vector<bool>& awaited, bool for_newcomers) const {
  std::vector<pollfd> watched = {{stop_.fd(), POLLIN, 0}, {waits_->fd(), POLLIN, 0}};
  if (for_newcomers) {
    for (const Door& door : options_.doors) watched.push_back({door.listening.get(), POLLIN, 0});
  }
  const bool idle = ticks_left_ == 0;
  (void)::poll(watched.data(), watched.size(),
               some_wait_       ? kResumePauseMs
               : !for_newcomers ? kAcceptPauseMs
               : idle           ? -1
                                : kTickMs);
  awaited.assign(options_.doors.size(), false);
  for (std::size_t i = 2; i < watched.size(); ++i) awaited[i - 2] = watched[i].revents != 0;
  return watched[0].revents != 0;
}

void Acceptor::Run() {
  bool short_of_descriptors = false;
  std::vector<bool> awaited;
  Clock::TimePoint ticked = options_.clock->Now();
  while (!Wait(awaited, !short_of_descriptors)) {
    short_of_descriptors = false;
    ResumeReading();
    for (std::size_t i = 0; i < awaited.size(); ++i) {
      if (awaited[i] && !AcceptFrom(options_.doors[i])) short_of_descriptors = true;
    }
    if (options_.clock->Now() - ticked < std::chrono::milliseconds(kTickMs)) continue;
    ticked = options_.clock->Now();
    Tick();
  }
}

void Acceptor::ResumeReading() {
  waits_->Drain();  // before Resume: who begins to wait then signals again
  some_wait_ = GuardedSockets::OfProcess().Resume() > 0;
}

void Acceptor::Tick() {
  counts_ = GuardedSockets::OfProcess().Sweep(options_.clock->Now());
  const bool busy = options_.tick() || counts_.all != 0;
  ticks_left_ = busy ? kLastTicks : std::max(0, ticks_left_ - 1);
}

bool Acceptor::AcceptFrom(const Door& door) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Fd socket(::accept4(door.listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (!IsShortage(errno)) return true;  // no more peers wait
      refusals_->Report("connection not accepted", door.address, ErrnoStatus("accepting"));
      return false;
    }
    absl::Status status;
    if (door.peers != nullptr) status = CheckPeer(socket.get(), *door.peers->Get());
    // The limit is for those who come by themselves: an operator may have to look at them.
    if (status.ok() && !door.trusted && counts_.all >= options_.most_connections) {
      status = absl::ResourceExhaustedError(
          Concat(counts_.all, " connections are open; the limit is ", options_.most_connections));
    }
    if (status.ok()) {
      Admit(door, std::move(socket));
    } else {
      refusals_->Report("connection refused", door.address, status);
    }
  }
  return true;
}

void Acceptor::Admit(const Door& door, Fd socket) {
  GuardedSockets& guarded = GuardedSockets::OfProcess();
  if (!door.trusted && counts_.unknown >= MostUnknown()) {
    counts_ = guarded.Sweep(options_.clock->Now());
    if (counts_.unknown >= MostUnknown()) (void)guarded.CutOldestUnknown();
  }
  if (door.tcp) {
    SendAtOnce(socket.get());
    SetPeerLimit(socket.get(), options_.peer_limit);
  }
  guarded.Add(socket.get(),
              std::make_shared<GuardedConnection>(GuardedConnection::Options{
                  .limits = door.trusted ? FrameGuard::Limits::Trusted() : FrameGuard::Limits(),
                  .registrar = options_.registrar,
                  .clock = options_.clock,
                  .tls = door.tls,
                  .trusted = door.trusted,
                  .on_cut =
                      [refusals = refusals_, address = door.address](const absl::Status& why) {
                        refusals->Report("connection cut", address, why);
                      },
                  .on_wait = [waits = waits_] { waits->Signal(); }}));
  ++counts_.all;
  ticks_left_ = kLastTicks;
  if (!door.trusted) ++counts_.unknown;
  door.take(std::move(socket));
}

void Acceptor::Refusals::Report(std::string_view what, std::string_view address,
                                const absl::Status& why) {
  using Reason = metrics::ConnectionRefusal;
  metrics_.connections_refused_total.Increment(absl::IsPermissionDenied(why)    ? Reason::kPeer
                                               : absl::IsResourceExhausted(why) ? Reason::kLimit
                                               : absl::IsDeadlineExceeded(why)  ? Reason::kUnknown
                                                                               : Reason::kProtocol);
  const std::optional<std::uint64_t> unsaid = lines_.Say(clock_.Now());
  if (!unsaid.has_value()) return;
  logger_.Log(LogLevel::kWarning, what,
              {{"address", address},
               {"error", AsStringView(why.message())},
               {"like_this_before", *unsaid}});
}

}  // namespace tessera::serving
