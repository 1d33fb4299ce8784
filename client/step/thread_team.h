// A fixed team of threads that runs the tasks of a ParallelFor.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/dispatch/attend.h"

namespace tessera::client {

// Between calls members spin for some tens of microseconds before they sleep, as the threads of an
// inference engine do: waking a sleeping thread takes as long.
//
// The caller's thread is a member. Tasks are taken one by one, so that an uneven split or a busy
// core delays the call by at most one task. One thread at a time may call ParallelFor.
class ThreadTeam final : public kernels::Executor {
 public:
  explicit ThreadTeam(std::uint32_t threads);
  ~ThreadTeam() override;
  std::uint32_t threads() const { return static_cast<std::uint32_t>(members_.size()) + 1; }
  void ParallelFor(std::uint32_t tasks, Task task, void* context) override;

 private:
  void Member();
  void Work();

  std::mutex mutex_;
  std::condition_variable start_;
  std::atomic<std::uint64_t> round_{0};  // changes under mutex_
  std::atomic<std::uint32_t> working_{0};
  std::uint32_t sleeping_ = 0;
  std::atomic<bool> stopping_{false};
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::uint32_t tasks_ = 0;
  std::atomic<std::uint32_t> next_{0};
  std::vector<std::thread> members_;
};

}  // namespace tessera::client
