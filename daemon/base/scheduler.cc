#include "daemon/base/scheduler.h"

#include <utility>

namespace tessera {

ThreadScheduler::ThreadScheduler(std::uint32_t threads) {
  for (std::uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
}

ThreadScheduler::~ThreadScheduler() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadScheduler::Submit(std::string, JobPriority priority, Job job) {
  {
    MutexLock lock(mutex_);
    queues_[static_cast<std::size_t>(priority)].push_back(std::move(job));
  }
  work_.NotifyOne();
}

bool ThreadScheduler::TakeJob(Job& job) {
  MutexLock lock(mutex_);
  for (;;) {
    if (stopping_) return false;
    for (std::deque<Job>& queue : queues_) {
      if (queue.empty()) continue;
      job = std::move(queue.front());
      queue.pop_front();
      return true;
    }
    work_.Wait(mutex_);
  }
}

void ThreadScheduler::Run() {
  Job job;
  while (TakeJob(job)) {
    std::move(job)();
    job = nullptr;  // what it held goes before the next wait
  }
}

}  // namespace tessera
