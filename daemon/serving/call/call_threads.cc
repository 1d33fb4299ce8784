#include "daemon/serving/call/call_threads.h"

#include <system_error>
#include <utility>

namespace tessera::serving {

CallThreads::~CallThreads() {
  MutexLock lock(mutex_);
  stopping_ = true;
  changed_.NotifyAll();
  while (threads_ + of_grpc_ != 0) ended_.Wait(mutex_);
}

std::size_t CallThreads::threads() const {
  MutexLock lock(mutex_);
  return threads_;
}

void CallThreads::Run(Work work) {
  if (!TakeThreadOfGrpc()) return Queue(std::move(work));
  std::move(work)();
  MutexLock lock(mutex_);
  if (--of_grpc_ + threads_ == 0) ended_.NotifyAll();
}

bool CallThreads::TakeThreadOfGrpc() {
  MutexLock lock(mutex_);
  if (of_grpc_ == options_.most_of_grpc) return false;
  ++of_grpc_;
  return true;
}

void CallThreads::Queue(Work work) {
  {
    MutexLock lock(mutex_);
    queue_.push_back(std::move(work));
    if (queue_.size() <= idle_) return changed_.NotifyOne();
    if (threads_ == options_.most) return;  // the next thread that is done takes it
    ++threads_;
  }
  if (StartThread()) return;
  // The system has no more threads. Another thread takes the work; without one, this thread does.
  std::deque<Work> ours;
  {
    MutexLock lock(mutex_);
    if (--threads_ == 0) ours.swap(queue_);
  }
  for (Work& one : ours) std::move(one)();
}

bool CallThreads::StartThread() {
  try {
    std::thread([this] { Loop(); }).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

void CallThreads::Loop() {
  for (;;) {
    Work work;
    {
      MutexLock lock(mutex_);
      if (!WaitForWork()) {
        if (--threads_ + of_grpc_ == 0) ended_.NotifyAll();
        return;
      }
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    std::move(work)();
  }
}

// False: it is time for the thread to end.
bool CallThreads::WaitForWork() {
  ++idle_;
  const Clock::TimePoint until = SystemClock().Now() + kIdle;
  const bool kept = threads_ <= kKept;
  bool in_time = true;
  while (queue_.empty() && !stopping_ && in_time) {
    if (kept) {
      changed_.Wait(mutex_);
    } else {
      in_time = changed_.WaitUntil(mutex_, until);
    }
  }
  --idle_;
  return !queue_.empty();
}

}  // namespace tessera::serving
