#include "client/cli/bench/threads.h"

namespace tessera::cli::bench {

ThreadTeam::ThreadTeam(std::uint32_t threads) {
  for (std::uint32_t i = 1; i < threads; ++i) members_.emplace_back([this] { Member(); });
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  start_.notify_all();
  for (std::thread& member : members_) member.join();
}

void ThreadTeam::Work() {
  for (std::uint32_t i = next_.fetch_add(1); i < tasks_; i = next_.fetch_add(1)) {
    task_(context_, i);
  }
}

void ThreadTeam::Member() {
  std::uint64_t seen = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      start_.wait(lock, [&] { return stopping_ || round_ != seen; });
      if (stopping_) return;
      seen = round_;
    }
    Work();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--working_ == 0) done_.notify_one();
  }
}

void ThreadTeam::ParallelFor(std::uint32_t tasks, Task task, void* context) {
  if (members_.empty() || tasks <= 1) {
    for (std::uint32_t i = 0; i < tasks; ++i) task(context, i);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    task_ = task;
    context_ = context;
    tasks_ = tasks;
    next_.store(0);
    working_ = static_cast<std::uint32_t>(members_.size());
    ++round_;
  }
  start_.notify_all();
  Work();
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return working_ == 0; });
}

}  // namespace tessera::cli::bench
