#include "daemon/serving/attach/unix_acceptor.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/unix_socket.h"

namespace tessera::serving {

namespace {
// Pause before the next attempt when descriptors have run out.
constexpr int kAcceptPauseMs = 100;
}  // namespace

absl::StatusOr<std::unique_ptr<UnixAcceptor>> UnixAcceptor::Listen(Options options) {
  absl::StatusOr<Fd> listening = ListenUnix(options.path, options.mode, /*non_blocking=*/true);
  if (!listening.ok()) return listening.status();
  absl::StatusOr<Event> stop = Event::Create();
  if (!stop.ok()) return stop.status();
  return std::unique_ptr<UnixAcceptor>(
      new UnixAcceptor(std::move(options), *std::move(listening), *std::move(stop)));
}

UnixAcceptor::~UnixAcceptor() {
  stop_.Signal();
  if (thread_.joinable()) thread_.join();
}

void UnixAcceptor::Start() {
  thread_ = std::thread([this] { Run(); });
}

bool UnixAcceptor::Wait(bool for_newcomers) const {
  pollfd watched[] = {{stop_.fd(), POLLIN, 0}, {listening_.get(), POLLIN, 0}};
  (void)::poll(watched, for_newcomers ? 2 : 1, for_newcomers ? -1 : kAcceptPauseMs);
  return watched[0].revents != 0;
}

void UnixAcceptor::Run() {
  bool short_of_descriptors = false;
  while (!Wait(!short_of_descriptors)) {
    Fd socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    short_of_descriptors = !socket.valid() && IsShortage(errno);
    if (short_of_descriptors) LogRefused("connection not accepted", ErrnoStatus("accepting"));
    if (!socket.valid()) continue;
    if (absl::Status status = CheckPeer(socket.get(), *options_.peers->Get()); !status.ok()) {
      LogRefused("connection refused", status);
      continue;
    }
    options_.take(std::move(socket));
  }
}

void UnixAcceptor::LogRefused(std::string_view what, const absl::Status& why) {
  const std::optional<std::uint64_t> unsaid = refusals_.Say(options_.clock->Now());
  if (!unsaid.has_value()) return;
  options_.logger->Log(LogLevel::kWarning, what,
                       {{"socket", options_.path},
                        {"error", AsStringView(why.message())},
                        {"like_this_before", *unsaid}});
}

}  // namespace tessera::serving
