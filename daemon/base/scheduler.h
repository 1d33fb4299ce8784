// Background work as a dependency: the daemon runs it on threads, tests run it job by job, by name
// (tests/fakes/manual_scheduler.h). Both take jobs in the order of FairQueue.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/fair_queue.h"
#include "daemon/base/mutex.h"

namespace tessera {

class Scheduler {
 public:
  using Job = FairQueue::Job;

  // Numbers of jobs, by priority, of one moment: every job submitted is in one of the three. Those
  // that were dropped are in none.
  struct Load {
    using ByPriority = std::array<std::uint64_t, kJobPriorities>;
    ByPriority queued{};
    ByPriority running{};
    ByPriority done{};
  };

  virtual ~Scheduler() = default;
  // Never blocks.
  virtual void Submit(JobSpec spec, Job job) = 0;
  virtual Load load() const = 0;
};

// A fixed number of threads. Idle, it sleeps. The destructor drops the jobs that wait, and those
// that running jobs submit meanwhile, then waits for the jobs that run.
//
// Where there are two threads or more, one is kept from seals and pressure jobs: a tail job never
// waits for the end of one. With one thread it does, so whoever submits long work cuts it in
// pieces, each a job that submits the next.
class ThreadScheduler final : public Scheduler {
 public:
  struct Options {
    std::uint32_t threads = 1;
    // The CPUs that the threads may run on, each of them on any; empty: those of the process.
    std::vector<std::uint32_t> cpus{};
  };
  // INVALID_ARGUMENT names the CPU that does not exist or is denied to this process.
  static absl::StatusOr<std::unique_ptr<ThreadScheduler>> Create(const Options& options);
  ~ThreadScheduler() override;

  void Submit(JobSpec spec, Job job) override;
  Load load() const override;

 private:
  explicit ThreadScheduler(std::uint32_t threads);
  absl::Status Pin(const std::vector<std::uint32_t>& cpus);
  void Run();
  // Nothing when it is time to end.
  std::optional<FairQueue::Entry> Take();
  void Finish(JobPriority priority);
  // The last priority that one more thread may begin a job of.
  JobPriority LastAllowed() const TESSERA_REQUIRES(mutex_);

  const std::uint32_t max_long_jobs_;  // seals and pressure jobs that may run at a time
  mutable Mutex mutex_;
  CondVar work_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  FairQueue queue_ TESSERA_GUARDED_BY(mutex_);
  Load::ByPriority running_ TESSERA_GUARDED_BY(mutex_){};
  Load::ByPriority done_ TESSERA_GUARDED_BY(mutex_){};
  std::vector<std::thread> threads_;
};

}  // namespace tessera
