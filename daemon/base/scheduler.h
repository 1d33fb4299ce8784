// Background work as an injected dependency. The daemon runs jobs on threads; tests run them one by
// one, by name (tests/fakes/manual_scheduler.h). Both take jobs in the order of FairQueue.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/fair_queue.h"
#include "daemon/base/heartbeat.h"
#include "daemon/base/mutex.h"

namespace tessera {

class Scheduler {
 public:
  using Job = FairQueue::Job;

  // Number of jobs by priority, all taken at one moment. Every submitted job is in exactly one of
  // the three, except dropped jobs, which are in none.
  struct Load {
    using ByPriority = std::array<std::uint64_t, kJobPriorities>;
    ByPriority queued{};
    ByPriority running{};
    ByPriority done{};
    // Time since the oldest queued or running job was submitted; 0: there is none.
    std::array<Clock::Duration, kJobPriorities> oldest{};
  };

  virtual ~Scheduler() = default;
  // Never blocks.
  virtual void Submit(JobSpec spec, Job job) = 0;
  virtual Load load() const = 0;
};

// Runs jobs on a fixed number of threads, which sleep while there is no job. Thread-safe. The
// destructor drops waiting jobs, and those that running jobs still submit, then waits for the
// running jobs.
//
// With two or more threads, one never runs seal or pressure jobs, so a tail job never waits for one
// to end. With one thread it does, so long work must be cut into pieces: jobs that each submit the
// next.
class ThreadScheduler final : public Scheduler {
 public:
  struct Options {
    std::uint32_t threads = 1;
    // CPUs that every thread may run on; empty: those of the process.
    std::vector<std::uint32_t> cpus{};
    // Beats whenever a thread looks for a job, so it falls silent when none of them comes back from
    // its job. Null: none, and idle threads sleep without a timeout. Outlives the scheduler.
    Heartbeats::Pulse* pulse = nullptr;
  };
  // INVALID_ARGUMENT names a CPU that does not exist, is offline or is denied to this process.
  static absl::StatusOr<std::unique_ptr<ThreadScheduler>> Create(const Options& options);
  ~ThreadScheduler() override;

  void Submit(JobSpec spec, Job job) override;
  Load load() const override;

 private:
  explicit ThreadScheduler(const Options& options);
  absl::Status Pin(const std::vector<std::uint32_t>& cpus);
  void Run();
  // Waits for a job that may run now; nullopt when stopping.
  std::optional<FairQueue::Entry> Take();
  void Finish(JobPriority priority, Clock::TimePoint submitted);
  // The least urgent priority that one more thread may run a job of.
  JobPriority LeastUrgentAllowed() const TESSERA_REQUIRES(mutex_);

  Heartbeats::Pulse* const pulse_;
  const std::uint32_t max_long_jobs_;  // seal and pressure jobs that may run at a time
  mutable Mutex mutex_;
  CondVar work_;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  FairQueue queue_ TESSERA_GUARDED_BY(mutex_);
  Load::ByPriority running_ TESSERA_GUARDED_BY(mutex_){};
  Load::ByPriority done_ TESSERA_GUARDED_BY(mutex_){};
  // When the queued and running jobs were submitted.
  std::array<std::multiset<Clock::TimePoint>, kJobPriorities> submitted_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
};

}  // namespace tessera
