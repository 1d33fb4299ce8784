#include "daemon/base/scheduler.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera {
namespace {

// Restricts `thread` to `cpus`. Returns the system's error number, 0 for success.
int SetAffinity(pthread_t thread, std::span<const std::uint32_t> cpus) {
  const std::size_t count = std::size_t{*std::max_element(cpus.begin(), cpus.end())} + 1;
  cpu_set_t* const mask = CPU_ALLOC(count);
  if (mask == nullptr) return ENOMEM;
  const std::size_t bytes = CPU_ALLOC_SIZE(count);
  CPU_ZERO_S(bytes, mask);
  for (const std::uint32_t cpu : cpus) CPU_SET_S(cpu, bytes, mask);
  const int error = ::pthread_setaffinity_np(thread, bytes, mask);
  CPU_FREE(mask);
  return error;
}

// Tries each CPU alone, on a temporary thread: the kernel silently ignores unusable CPUs of a mask
// as long as one is usable.
absl::Status CheckCpus(const std::vector<std::uint32_t>& cpus) {
  absl::Status status;
  std::thread([&cpus, &status] {
    for (const std::uint32_t cpu : cpus) {
      const int error = SetAffinity(::pthread_self(), {&cpu, 1});
      if (error == EINVAL) {
        status = absl::InvalidArgumentError(
            Concat("CPU ", cpu, " does not exist, is offline or is denied to this process"));
      } else if (error != 0) {
        status = absl::ErrnoToStatus(error, Concat("cannot run a thread on CPU ", cpu));
      }
      if (!status.ok()) return;
    }
  }).join();
  return status;
}

std::size_t Index(JobPriority priority) { return static_cast<std::size_t>(priority); }

}  // namespace

absl::StatusOr<std::unique_ptr<ThreadScheduler>> ThreadScheduler::Create(const Options& options) {
  if (options.threads == 0) return absl::InvalidArgumentError("0 threads: at least 1 is needed");
  if (absl::Status status = CheckCpus(options.cpus); !status.ok()) return status;
  std::unique_ptr<ThreadScheduler> scheduler(new ThreadScheduler(options));
  if (absl::Status status = scheduler->Pin(options.cpus); !status.ok()) return status;
  return scheduler;
}

ThreadScheduler::ThreadScheduler(const Options& options)
    : pulse_(options.pulse), max_long_jobs_(std::max(options.threads, std::uint32_t{2}) - 1) {
  for (std::uint32_t i = 0; i < options.threads; ++i) threads_.emplace_back([this] { Run(); });
}

absl::Status ThreadScheduler::Pin(const std::vector<std::uint32_t>& cpus) {
  if (cpus.empty()) return absl::OkStatus();
  for (std::thread& thread : threads_) {
    if (const int error = SetAffinity(thread.native_handle(), cpus); error != 0) {
      return absl::ErrnoToStatus(error, Concat("cannot pin a thread to ", cpus.size(), " CPUs"));
    }
  }
  return absl::OkStatus();
}

ThreadScheduler::~ThreadScheduler() {
  FairQueue dropped;  // destroyed outside the lock: destroying what jobs hold may take long
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    std::swap(dropped, queue_);
  }
  work_.NotifyAll();
  while (dropped.Pop().has_value()) {
  }
  for (std::thread& thread : threads_) thread.join();
  if (pulse_ != nullptr) pulse_->End();
}

void ThreadScheduler::Submit(JobSpec spec, Job job) {
  {
    MutexLock lock(mutex_);
    if (stopping_) return;
    const Clock::TimePoint now = SystemClock().Now();
    submitted_[Index(spec.priority)].insert(now);
    queue_.Push(std::move(spec), std::move(job), now);
  }
  work_.NotifyOne();
}

Scheduler::Load ThreadScheduler::load() const {
  const Clock::TimePoint now = SystemClock().Now();
  MutexLock lock(mutex_);
  Load load{.queued = {}, .running = running_, .done = done_, .oldest = {}};
  for (std::size_t i = 0; i < kJobPriorities; ++i) {
    load.queued[i] = queue_.size(static_cast<JobPriority>(i));
    if (submitted_[i].empty()) continue;
    load.oldest[i] = std::max(now - *submitted_[i].begin(), Clock::Duration::zero());
  }
  return load;
}

JobPriority ThreadScheduler::LeastUrgentAllowed() const {
  const std::uint64_t long_jobs =
      running_[Index(JobPriority::kSeals)] + running_[Index(JobPriority::kPressure)];
  return long_jobs < max_long_jobs_ ? JobPriority::kPressure : JobPriority::kTails;
}

// No wake is lost while a long job may not start. The thread that ends a long job looks here next;
// if it takes a tail job instead, the thread that was woken for the tail job looks here next.
std::optional<FairQueue::Entry> ThreadScheduler::Take() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    if (pulse_ != nullptr) pulse_->Beat();
    if (std::optional<FairQueue::Entry> entry = queue_.Pop(LeastUrgentAllowed());
        entry.has_value()) {
      ++running_[Index(entry->spec.priority)];
      return entry;
    }
    if (pulse_ == nullptr) {
      work_.Wait(mutex_);
    } else {
      (void)work_.WaitUntil(mutex_, SystemClock().Now() + kHeartbeatInterval);
    }
  }
  return std::nullopt;
}

void ThreadScheduler::Finish(JobPriority priority, Clock::TimePoint submitted) {
  MutexLock lock(mutex_);
  std::multiset<Clock::TimePoint>& times = submitted_[Index(priority)];
  times.erase(times.find(submitted));
  --running_[Index(priority)];
  ++done_[Index(priority)];
}

void ThreadScheduler::Run() {
  while (std::optional<FairQueue::Entry> entry = Take()) {
    std::move(entry->job)();
    entry->job = nullptr;  // destroy what it held before it counts as done
    Finish(entry->spec.priority, entry->submitted);
  }
}

}  // namespace tessera
