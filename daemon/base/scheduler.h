// Background work as a dependency: the daemon runs it on threads, tests run it job by job, by name
// (tests/fakes/manual_scheduler.h).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "daemon/base/mutex.h"

namespace tessera {

// Lower runs first.
enum class JobPriority : std::uint8_t { kTails = 0, kSeals = 1, kPressure = 2 };
inline constexpr std::size_t kJobPriorities = 3;

class Scheduler {
 public:
  using Job = absl::AnyInvocable<void() &&>;
  virtual ~Scheduler() = default;
  // Never blocks. `name` says what kind of work it is: "absorb-tails", say.
  virtual void Submit(std::string name, JobPriority priority, Job job) = 0;
};

// A fixed number of threads; first in, first out within a priority. Idle, it sleeps. The destructor
// finishes the jobs that run and drops those that wait.
class ThreadScheduler final : public Scheduler {
 public:
  explicit ThreadScheduler(std::uint32_t threads);
  ~ThreadScheduler() override;
  void Submit(std::string name, JobPriority priority, Job job) override;

 private:
  void Run();
  bool TakeJob(Job& job);

  Mutex mutex_;
  CondVar work_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  std::array<std::deque<Job>, kJobPriorities> queues_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace tessera
