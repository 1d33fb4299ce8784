// A scheduler whose background jobs run only when the test asks, one at a time or by name.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/base/scheduler.h"

namespace tessera {

// Thread-safe. Jobs run on the thread that calls a Run function. The order is that of a
// ThreadScheduler with one thread, unless the test names another job.
class ManualScheduler final : public Scheduler {
 public:
  void Submit(JobSpec spec, Job job) override {
    MutexLock lock(mutex_);
    queue_.Push(std::move(spec), std::move(job));
  }

  Load load() const override {
    MutexLock lock(mutex_);
    Load load = ran_;
    for (std::size_t i = 0; i < kJobPriorities; ++i) {
      load.queued[i] = queue_.size(static_cast<JobPriority>(i));
    }
    return load;
  }

  // Runs the next job and returns its name. Returns nullopt if none is queued.
  std::optional<std::string> RunNext() {
    std::optional<FairQueue::Entry> entry;
    {
      MutexLock lock(mutex_);
      entry = queue_.Pop();
    }
    if (!entry.has_value()) return std::nullopt;
    return RunJob(*std::move(entry));
  }

  // Runs the first job with that name; the others keep their order. Returns false if there is none.
  bool RunFirst(const std::string& name) {
    std::optional<FairQueue::Entry> entry;
    {
      MutexLock lock(mutex_);
      entry = TakeFirst(name);
    }
    if (!entry.has_value()) return false;
    RunJob(*std::move(entry));
    return true;
  }

  // Runs jobs with that name, including those that they queue, until none is left or `limit` ran.
  // Returns the number of jobs that ran.
  int RunAll(const std::string& name, int limit = 1000) {
    int ran = 0;
    while (ran < limit && RunFirst(name)) ++ran;
    return ran;
  }

  // The queued jobs in the order in which they would run.
  std::vector<JobSpec> QueuedSpecs() {
    MutexLock lock(mutex_);
    std::vector<JobSpec> specs;
    std::vector<FairQueue::Entry> entries = Drain();
    for (const FairQueue::Entry& entry : entries) specs.push_back(entry.spec);
    Refill(std::move(entries));
    return specs;
  }
  std::vector<std::string> Queued() {
    std::vector<std::string> names;
    for (JobSpec& spec : QueuedSpecs()) names.push_back(std::move(spec.name));
    return names;
  }

 private:
  std::string RunJob(FairQueue::Entry entry) {
    const auto priority = static_cast<std::size_t>(entry.spec.priority);
    {
      MutexLock lock(mutex_);
      ++ran_.running[priority];
    }
    std::move(entry.job)();
    entry.job = nullptr;
    MutexLock lock(mutex_);
    --ran_.running[priority];
    ++ran_.done[priority];
    return std::move(entry.spec.name);
  }

  std::optional<FairQueue::Entry> TakeFirst(const std::string& name) TESSERA_REQUIRES(mutex_) {
    std::vector<FairQueue::Entry> entries = Drain();
    const auto found = std::find_if(entries.begin(), entries.end(),
                                    [&name](const auto& entry) { return entry.spec.name == name; });
    std::optional<FairQueue::Entry> taken;
    if (found != entries.end()) {
      taken = std::move(*found);
      entries.erase(found);
    }
    Refill(std::move(entries));
    return taken;
  }

  // Refilling a queue in the order of its draining preserves the order of the jobs.
  std::vector<FairQueue::Entry> Drain() TESSERA_REQUIRES(mutex_) {
    std::vector<FairQueue::Entry> entries;
    while (std::optional<FairQueue::Entry> entry = queue_.Pop()) {
      entries.push_back(*std::move(entry));
    }
    return entries;
  }
  void Refill(std::vector<FairQueue::Entry> entries) TESSERA_REQUIRES(mutex_) {
    for (FairQueue::Entry& entry : entries) {
      queue_.Push(std::move(entry.spec), std::move(entry.job));
    }
  }

  mutable Mutex mutex_;
  FairQueue queue_ TESSERA_GUARDED_BY(mutex_);
  Load ran_ TESSERA_GUARDED_BY(mutex_);  // excludes queued jobs
};

}  // namespace tessera
