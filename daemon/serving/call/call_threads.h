// CallThreads: the threads that run the workers' calls.
//
// gRPC's own threads receive and send. A call may run on the one that received it, which saves a
// change of threads, as long as another is left to receive and send for everybody else.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <thread>

#include "absl/functional/any_invocable.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"

namespace tessera::serving {

// Thread-safe. Threads start when calls need them. All but a few end when they have been idle for a
// while.
class CallThreads {
 public:
  using Work = absl::AnyInvocable<void() &&>;

  struct Options {
    // Threads at most. Callers limit the calls (calls.h), so none waits for long.
    std::size_t most = 0;
    // Threads of gRPC that may work at a time, beside these.
    std::size_t most_of_grpc = 0;
  };
  explicit CallThreads(const Options& options) : options_(options) {}
  // gRPC makes so many threads for callbacks, and at least 2 (callback_common.cc of its 1.51).
  static std::size_t ThreadsOfGrpc() {
    return std::clamp<std::size_t>(std::thread::hardware_concurrency() / 2, 2, 16);
  }
  // Waits until all work is done.
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

  // Runs `work` on this thread, which is one of gRPC's, or on one of the own threads. Never waits
  // for other work.
  void Run(Work work);
  std::size_t threads() const;

 private:
  static constexpr std::chrono::seconds kIdle{10};
  static constexpr std::size_t kKept = 4;

  bool TakeThreadOfGrpc();
  void Queue(Work work);
  void Loop();
  bool WaitForWork() TESSERA_REQUIRES(mutex_);
  bool StartThread();

  const Options options_;
  mutable Mutex mutex_;
  CondVar changed_;
  CondVar ended_;
  std::deque<Work> queue_ TESSERA_GUARDED_BY(mutex_);
  std::size_t threads_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::size_t idle_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::size_t of_grpc_ TESSERA_GUARDED_BY(mutex_) = 0;  // at work
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera::serving
