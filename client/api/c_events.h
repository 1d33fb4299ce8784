// The queue behind tessera_events_fd. The lease thread pushes, any thread takes.
#pragma once

#include <cstddef>
#include <deque>

#include "daemon/base/mutex.h"
#include "tessera/options.h"
#include "tessera/tessera.h"

namespace tessera::client {

class CEvents {
 public:
  CEvents();
  ~CEvents();
  CEvents(const CEvents&) = delete;
  CEvents& operator=(const CEvents&) = delete;

  // Has these options report their events here. The queue must outlive the worker.
  void Listen(AttachOptions& options);
  // TESSERA_EVENT_NONE if no event waits.
  tessera_event Take();
  // Readable while events wait; -1 if the process had no descriptor left.
  int fd() const { return fd_; }

 private:
  void Push(const tessera_event& event);

  static constexpr std::size_t kMost = 1024;
  const int fd_;  // an eventfd
  Mutex mutex_;
  std::deque<tessera_event> events_ TESSERA_GUARDED_BY(mutex_);
  bool overflowed_ TESSERA_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera::client
