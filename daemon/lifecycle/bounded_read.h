// BoundedRead calls a function that reads files, with a time limit. A file on a network file system
// blocks its reader until the server answers.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"

namespace tessera::lifecycle {

// Thread-safe. May be destroyed while a read hangs, so `read` must own what it uses.
template <typename Result>
class BoundedRead {
 public:
  BoundedRead(std::function<Result()> read, std::chrono::milliseconds limit)
      : limit_(limit), state_(std::make_shared<State>()) {
    state_->read = std::move(read);
  }

  // Returns what `read` returns. DEADLINE_EXCEEDED if that takes longer than the limit, and
  // UNAVAILABLE while an earlier read hangs. One call at a time reads; others are UNAVAILABLE.
  absl::StatusOr<Result> Read() {
    const std::shared_ptr<State> state = state_;
    {
      MutexLock lock(state->mutex);
      if (std::exchange(state->reading, true)) {
        return absl::UnavailableError("an earlier read of the files has not ended");
      }
      state->result.reset();
    }
    try {
      std::thread([state] { state->Run(); }).detach();
    } catch (const std::system_error& error) {
      MutexLock lock(state->mutex);
      state->reading = false;
      return absl::ResourceExhaustedError(
          Concat("no thread can be started to read the files: ", error.what()));
    }
    const Clock::TimePoint deadline = SystemClock().Now() + limit_;
    MutexLock lock(state->mutex);
    while (state->reading) {
      if (state->ended.WaitUntil(state->mutex, deadline) || !state->reading) continue;
      return absl::DeadlineExceededError(
          Concat("the files could not be read within ", limit_.count(),
                 " ms; is the file system that has them reachable?"));
    }
    return *std::exchange(state->result, std::nullopt);
  }

 private:
  struct State {
    void Run() {
      Result read_now = read();
      MutexLock lock(mutex);
      result = std::move(read_now);
      reading = false;
      ended.NotifyAll();
    }

    std::function<Result()> read;  // set once
    Mutex mutex;
    CondVar ended;
    bool reading TESSERA_GUARDED_BY(mutex) = false;
    std::optional<Result> result TESSERA_GUARDED_BY(mutex);
  };

  const std::chrono::milliseconds limit_;
  const std::shared_ptr<State> state_;
};

}  // namespace tessera::lifecycle
