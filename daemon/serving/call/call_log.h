// CallLog writes log lines about single calls: slow ones, failed ones, and the operator's changes.
#pragma once

#include <grpcpp/server_context.h>

#include <atomic>
#include <chrono>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/rate_limit.h"

namespace tessera::serving {

// Owned by RunDaemon. Thread-safe.
//
//   slow call     warning: it took longer than the limit
//   call failed   error if the daemon is at fault (INTERNAL, UNKNOWN, DATA_LOSS), else debug
//   admin call    info: the audit line of a call that changes something
//
// Slow calls, failed calls, and the operator's calls that failed get at most ten lines a second
// each; a line says how many were left out. Every change that was made has its line.
class CallLog {
 public:
  // `slow` zero: no call is slow.
  CallLog(Logger& logger, const Clock& clock, Clock::Duration slow = Clock::Duration::zero())
      : logger_(logger), clock_(clock), slow_(slow) {}
  void SetSlow(Clock::Duration slow) { slow_.store(slow, std::memory_order_relaxed); }

  // Call it at the end of every call.
  void Finished(std::string_view method, const grpc::ServerContextBase& context,
                const absl::Status& status, Clock::Duration duration) {
    const Clock::Duration slow = slow_.load(std::memory_order_relaxed);
    const bool is_slow = slow != Clock::Duration::zero() && duration > slow;
    if (is_slow || !status.ok()) Write(method, context, status, duration, is_slow);
  }

  // `object` is what the call acts on, as in "sequence 4711".
  void Audit(std::string_view method, std::string_view object,
             const grpc::ServerContextBase& context, const absl::Status& status);

 private:
  void Write(std::string_view method, const grpc::ServerContextBase& context,
             const absl::Status& status, Clock::Duration duration, bool is_slow);

  static constexpr std::chrono::milliseconds kBetween{100};
  Logger& logger_;
  const Clock& clock_;
  std::atomic<Clock::Duration> slow_;
  LogRateLimit slow_lines_{kBetween};
  LogRateLimit failed_lines_{kBetween};
  LogRateLimit failed_audits_{kBetween};
};

}  // namespace tessera::serving
