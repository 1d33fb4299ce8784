// Runs background jobs one at a time, on a separate thread while a call waits for them.
#pragma once

#include <functional>
#include <thread>
#include <utility>

#include "daemon/base/mutex.h"
#include "daemon/base/scheduler.h"
#include "tests/fakes/manual_scheduler.h"

namespace tessera::fuzz {

class StepScheduler final : public Scheduler {
 public:
  void Submit(JobSpec spec, Job job) override {
    jobs_.Submit(std::move(spec), std::move(job));
    MutexLock lock(mutex_);
    ++submitted_;
    changed_.NotifyAll();
  }
  Load load() const override { return jobs_.load(); }

  // Runs at most `most` jobs. Returns their number.
  int Run(int most) {
    int ran = 0;
    while (ran < most && jobs_.RunNext().has_value()) ++ran;
    return ran;
  }

  // Runs `call` while another thread runs jobs.
  template <typename Call>
  auto Beside(Call call) {
    std::thread thread([this] { RunUntilOver(); });
    auto result = call();
    {
      MutexLock lock(mutex_);
      over_ = true;
      changed_.NotifyAll();
    }
    thread.join();
    MutexLock lock(mutex_);
    over_ = false;
    return result;
  }

 private:
  void RunUntilOver() {
    for (;;) {
      std::uint64_t seen = 0;
      {
        MutexLock lock(mutex_);
        if (over_) return;
        seen = submitted_;
      }
      if (jobs_.RunNext().has_value()) continue;
      MutexLock lock(mutex_);
      while (!over_ && submitted_ == seen) changed_.Wait(mutex_);
    }
  }

  ManualScheduler jobs_;
  Mutex mutex_;
  CondVar changed_;
  std::uint64_t submitted_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool over_ TESSERA_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera::fuzz
