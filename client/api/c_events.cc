#include "client/api/c_events.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "daemon/base/strings.h"

namespace tessera::client {

CEvents::CEvents() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

CEvents::~CEvents() {
  if (fd_ >= 0) ::close(fd_);
}

void CEvents::Listen(AttachOptions& options) {
  options.on_draining = [this](std::chrono::nanoseconds limit) {
    tessera_event event = TESSERA_EVENT_INIT;
    event.kind = TESSERA_EVENT_DRAINING;
    event.limit_ms = static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(limit).count());
    Push(event);
  };
  options.on_lease_lost = [this](const absl::Status& reason) {
    tessera_event event = TESSERA_EVENT_INIT;
    event.kind = TESSERA_EVENT_LEASE_LOST;
    const std::string_view text = AsStringView(reason.message());
    text.copy(event.text, std::min(text.size(), sizeof event.text - 1));
    Push(event);
  };
  options.on_reattached = [this](const ReattachReport& report) {
    tessera_event event = TESSERA_EVENT_INIT;
    event.kind = TESSERA_EVENT_REATTACHED;
    event.same_daemon = report.same_daemon;
    Push(event);
    for (const SequenceId gone : report.gone) {
      tessera_event lost = TESSERA_EVENT_INIT;
      lost.kind = TESSERA_EVENT_GONE;
      lost.sequence_id = gone.value();
      Push(lost);
    }
  };
}

void CEvents::Push(const tessera_event& event) {
  MutexLock lock(mutex_);
  if (events_.size() == kMost) {
    events_.pop_front();
    overflowed_ = true;
  }
  events_.push_back(event);
  const std::uint64_t one = 1;
  // It cannot fail: the counter is reset whenever the queue becomes empty.
  if (fd_ >= 0) (void)!::write(fd_, &one, sizeof one);
}

tessera_event CEvents::Take() {
  tessera_event event = TESSERA_EVENT_INIT;
  MutexLock lock(mutex_);
  if (overflowed_) {
    overflowed_ = false;
    event.kind = TESSERA_EVENT_OVERFLOW;
    return event;
  }
  if (!events_.empty()) {
    event = events_.front();
    events_.pop_front();
  }
  if (events_.empty() && fd_ >= 0) {
    std::uint64_t count = 0;
    (void)!::read(fd_, &count, sizeof count);
  }
  return event;
}

}  // namespace tessera::client
