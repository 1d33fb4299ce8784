// CallThreads: the threads that run the workers' calls. gRPC's own threads only receive and send,
// so no peer can hold one of them.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>

#include "absl/functional/any_invocable.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera::serving {

// Thread-safe. Threads start when calls need them. All but a few end when they have been idle for a
// while.
class CallThreads {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  // At most `most` threads. Callers limit the calls (calls.h), so none waits for long.
  explicit CallThreads(std::size_t most) : most_(most) {}
  // Waits until all work is done.
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

  // Runs `work` on one of the threads. Never waits for other work.
  void Run(Work work);
  std::size_t threads() const;

 private:
  static constexpr std::chrono::seconds kIdle{10};
  static constexpr std::size_t kKept = 4;

  void Loop();
  bool WaitForWork() TESSERA_REQUIRES(mutex_);
  bool StartThread();

  const std::size_t most_;
  mutable Mutex mutex_;
  CondVar changed_;
  CondVar ended_;
  std::deque<Work> queue_ TESSERA_GUARDED_BY(mutex_);
  std::size_t threads_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::size_t idle_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera::serving
