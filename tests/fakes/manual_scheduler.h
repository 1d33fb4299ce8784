// Background work that runs when the test says so, job by job, by name.
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/base/scheduler.h"

namespace tessera {

// Thread-safe; jobs run on the thread that asks for them.
class ManualScheduler final : public Scheduler {
 public:
  void Submit(std::string name, JobPriority priority, Job job) override {
    MutexLock lock(mutex_);
    queue_.push_back({std::move(name), priority, std::move(job)});
  }

  // Runs the first queued job of that name. False where there is none.
  bool RunFirst(const std::string& name) {
    Job job;
    {
      MutexLock lock(mutex_);
      auto it = queue_.begin();
      while (it != queue_.end() && it->name != name) ++it;
      if (it == queue_.end()) return false;
      job = std::move(it->job);
      queue_.erase(it);
    }
    std::move(job)();
    return true;
  }

  // Runs jobs of that name, those they queue included, until none is left or `limit` ran. Returns
  // how many ran.
  int RunAll(const std::string& name, int limit = 1000) {
    int ran = 0;
    while (ran < limit && RunFirst(name)) ++ran;
    return ran;
  }

  // Names in the order of submission.
  std::vector<std::string> Queued() const {
    MutexLock lock(mutex_);
    std::vector<std::string> names;
    for (const Entry& entry : queue_) names.push_back(entry.name);
    return names;
  }

 private:
  struct Entry {
    std::string name;
    JobPriority priority;
    Job job;
  };
  mutable Mutex mutex_;
  std::deque<Entry> queue_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
