// std::mutex and std::condition_variable with Clang's thread-safety annotations. A Clang build
// refuses code that accesses a TESSERA_GUARDED_BY member without its lock.
//
// Why not absl::Mutex: the distributions' builds of it are not instrumented, so ThreadSanitizer
// reports false races in everything it protects.
#pragma once

#include <condition_variable>
#include <mutex>

#include "daemon/base/clock.h"

#if defined(__clang__)
#define TESSERA_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define TESSERA_THREAD_ANNOTATION(x)
#endif

#define TESSERA_CAPABILITY(name) TESSERA_THREAD_ANNOTATION(capability(name))
#define TESSERA_SCOPED_CAPABILITY TESSERA_THREAD_ANNOTATION(scoped_lockable)
#define TESSERA_GUARDED_BY(mutex) TESSERA_THREAD_ANNOTATION(guarded_by(mutex))
#define TESSERA_PT_GUARDED_BY(mutex) TESSERA_THREAD_ANNOTATION(pt_guarded_by(mutex))
#define TESSERA_ACQUIRED_BEFORE(...) TESSERA_THREAD_ANNOTATION(acquired_before(__VA_ARGS__))
#define TESSERA_ACQUIRED_AFTER(...) TESSERA_THREAD_ANNOTATION(acquired_after(__VA_ARGS__))
#define TESSERA_REQUIRES(...) TESSERA_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define TESSERA_EXCLUDES(...) TESSERA_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define TESSERA_ACQUIRE(...) TESSERA_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define TESSERA_TRY_ACQUIRE(...) TESSERA_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define TESSERA_RELEASE(...) TESSERA_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TESSERA_ASSERT_HELD(...) TESSERA_THREAD_ANNOTATION(assert_capability(__VA_ARGS__))
#define TESSERA_RETURN_CAPABILITY(x) TESSERA_THREAD_ANNOTATION(lock_returned(x))
#define TESSERA_NO_THREAD_SAFETY_ANALYSIS TESSERA_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace tessera {

class TESSERA_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() TESSERA_ACQUIRE() { mutex_.lock(); }
  void Unlock() TESSERA_RELEASE() { mutex_.unlock(); }
  bool TryLock() TESSERA_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class TESSERA_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TESSERA_ACQUIRE(mutex) : mutex_(mutex) { mutex_.Lock(); }
  ~MutexLock() TESSERA_RELEASE() { mutex_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  // For functions that take a lock as proof that the caller holds `mutex`.
  bool Holds(const Mutex& mutex) const { return &mutex == &mutex_; }

 private:
  Mutex& mutex_;
};

// Waits may wake spuriously: always wait in a loop over the condition. Write the loop in the
// function that holds the lock, where the analysis can see it.
class CondVar {
 public:
  CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void Wait(Mutex& mutex) TESSERA_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  // Returns false once `deadline` (of the real monotonic clock) has passed.
  bool WaitUntil(Mutex& mutex, Clock::TimePoint deadline) TESSERA_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const std::cv_status status = condition_.wait_until(lock, deadline);
    lock.release();
    return status == std::cv_status::no_timeout;
  }

  void NotifyOne() { condition_.notify_one(); }
  void NotifyAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace tessera
