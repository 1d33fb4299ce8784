#include "client/step/thread_team.h"

namespace tessera::client {

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

namespace {

// Some tens of microseconds.
constexpr int kSpins = 2000;

// Spins until `happened` or the limit.
void SpinUntil(const auto& happened) {
  for (int i = 0; i < kSpins && !happened(); ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

}  // namespace

void ThreadTeam::Member() {
  std::uint64_t seen = 0;
  const auto called = [&] { return stopping_.load() || round_.load() != seen; };
  for (;;) {
    SpinUntil(called);
    if (!called()) {
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      start_.wait(lock, called);
      --sleeping_;
    }
    if (stopping_) return;
    seen = round_.load();
    Work();
    working_.fetch_sub(1);
  }
}

void ThreadTeam::ParallelFor(std::uint32_t tasks, Task task, void* context) {
  if (members_.empty() || tasks <= 1) {
    for (std::uint32_t i = 0; i < tasks; ++i) task(context, i);
    return;
  }
  bool wake = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    task_ = task;
    context_ = context;
    tasks_ = tasks;
    next_.store(0);
    working_ = static_cast<std::uint32_t>(members_.size());
    round_.fetch_add(1);
    wake = sleeping_ != 0;
  }
  if (wake) start_.notify_all();
  Work();
  while (working_.load() != 0) {
    SpinUntil([&] { return working_.load() == 0; });
    if (working_.load() != 0) std::this_thread::yield();
  }
}

}  // namespace tessera::client
