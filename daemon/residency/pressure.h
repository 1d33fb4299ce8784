// `Pressure` decides when the ladder of measures is climbed, for which caller and at whose expense.
//
// - In the background: an account above its high watermark, or a refused request, queues the job
//   "relieve". It climbs until the account is below its low watermark.
// - In a call: when an operation is refused for lack of pool memory, the ladder is climbed for the
//   bytes requested. The call then waits a bounded time for readers and is retried.
//
// Who gives up memory: for a tenant's own limit, that tenant alone. For the node's memory, first
// the tenants above their soft limits, down to those limits; then all tenants, down to the bytes
// that are reserved for them, unless the caller is above its own soft limit. Within a group, one
// rung is applied to all tenants, largest first, before the next rung is applied to any: no tenant
// loses channels while another's unused prefixes could be dropped.
//
// Pressed takes no lock of cache or pool. Relief runs without any lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/mutex.h"
#include "daemon/base/rate_limit.h"
#include "daemon/base/scheduler.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/pool/account.h"
#include "daemon/residency/measure.h"
#include "daemon/residency/memory_waiters.h"

namespace tessera::residency {

// How a climb of one rung ended.
enum class Outcome : std::uint8_t { kEnough, kSome, kNothing };
inline constexpr std::size_t kOutcomes = 3;
std::string_view OutcomeName(Outcome outcome);

class Pressure final : public pool::PressureHandler {
 public:
  struct Options {
    cache::Node* node;
    Scheduler* scheduler;
    Logger* logger;
    const Clock* clock;
    // Blocks a call while it waits for readers or for a sequence to become idle.
    std::function<void(Clock::Duration)> pause;
    std::uint32_t high_percent = 90;  // of a limit
    std::uint32_t low_percent = 80;
    Clock::Duration patience = std::chrono::seconds(2);  // longest total wait of a call
    // The rungs, cheapest first.
    std::vector<std::unique_ptr<Measure>> ladder;
  };
  // Starts watching the accounts of the node and its tenants.
  explicit Pressure(Options options);
  // No call may be in progress, and the scheduler must not run its job any more.
  ~Pressure() override;

  void Pressed(const pool::Account& account, std::uint64_t missing) override;

  // Watches the accounts of all tenants, at watermarks of their present limits. Call it again when
  // tenants were added or limits changed. Thread-safe.
  void WatchTenants();

  // Runs `act` for the tenant, and retries it while it fails for lack of pool memory and memory can
  // be found. Retries are bounded in number and time, and stop when `gone` returns true. The final
  // error says what was tried and what would help. `act` must change nothing when it fails. Both
  // are called without any lock held.
  absl::Status RetryWhenPoolFull(cache::Tenant& tenant, absl::FunctionRef<absl::Status()> act,
                                 absl::FunctionRef<bool()> gone);

  struct Counters {
    // By rung, in the ladder's order.
    struct Rung {
      std::array<std::atomic<std::uint64_t>, kOutcomes> climbs{};
      std::atomic<std::uint64_t> steps{0};  // sum of Relief::steps
    };
    std::vector<Rung> rungs;
    std::atomic<std::uint64_t> served{0};   // calls that succeeded on a retry
    std::atomic<std::uint64_t> refused{0};  // calls that ran out of memory in the end
  };
  const Counters& counters() const { return counters_; }
  // Calls of one tenant refused for lack of pool memory, by what was full.
  struct Refusals {
    std::atomic<std::uint64_t> quota{0};  // a limit of the tenant
    std::atomic<std::uint64_t> node{0};
  };
  const Refusals& refusals(const cache::Tenant& tenant) const {
    return refusals_[tenant.options().id.value() - 1];
  }
  const std::vector<std::unique_ptr<Measure>>& ladder() const { return options_.ladder; }

 private:
  // The result of climbing the ladder.
  struct Climb {
    std::uint64_t bytes = 0;
    std::string hindrances;
    std::optional<Clock::Duration> wait;
    std::vector<cache::Tenant*> gave;
  };
  // The tenants that may have to give up memory, and how much each at most. Groups are ordered: a
  // later group pays only if the earlier ones were not enough.
  struct Payer {
    cache::Tenant* tenant;
    std::uint64_t most;
  };
  using Payers = std::vector<Payer>;
  std::vector<Payers> PayersOf(cache::Tenant* asker, std::uint64_t asked) const;
  Climb Relieve(std::vector<Payers> payers, const Need& need, std::string_view reason);
  std::uint64_t ClimbRung(std::size_t rung, cache::Tenant& tenant, const Need& need,
                          std::string_view reason, Climb& climb);
  Climb RelieveFor(cache::Tenant& tenant, const pool::Shortage& shortage, const Need& need);
  static bool OfPool(const pool::Shortage& shortage);
  // Whether the ladder may free enough.
  static bool MayHelp(const pool::Shortage& shortage) {
    return OfPool(shortage) && shortage.asked <= shortage.limit;
  }
  void CountRefusal(const cache::Tenant& tenant, const pool::Shortage& shortage);
  std::vector<cache::Tenant*> TenantsToWaitFor(cache::Tenant& tenant,
                                               const pool::Shortage& shortage,
                                               const Climb& climb) const;
  bool WaitForReaders(const std::vector<cache::Tenant*>& tenants, Clock::TimePoint until,
                      absl::FunctionRef<bool()> gone);

  void Queue();
  void RelieveInBackground();
  void Report(std::size_t rung, const cache::Tenant& tenant, std::string_view reason,
              std::uint64_t asked, const Relief& relief);
  void ReportRefusal(const cache::Tenant& tenant, const pool::Shortage& shortage,
                     const Climb& climb);

  const Options options_;
  Counters counters_;
  std::atomic<bool> queued_{false};
  std::atomic<std::uint64_t> missing_{0};  // the largest request refused since the last job
  // Until this time no job is queued, because the ladder had nothing to give.
  std::atomic<std::int64_t> quiet_until_{0};
  std::vector<std::atomic<std::uint32_t>> waiting_;  // number of waiting calls, by tenant
  MemoryWaiters line_;                               // calls that did not get room at once
  // Actions not yet logged, by rung, tenant and reason. Each log line covers everything since the
  // previous line, at most one line per second. The destructor logs the rest.
  struct PendingLog {
    LogRateLimit seldom;
    std::uint64_t steps = 0;
    std::uint64_t bytes = 0;
  };
  using LogKey = std::tuple<std::size_t, std::string, std::string>;
  Mutex pending_logs_mutex_;
  std::map<LogKey, PendingLog> pending_logs_ TESSERA_GUARDED_BY(pending_logs_mutex_);
  std::vector<Refusals> refusals_;            // by tenant
  std::vector<LogRateLimit> refusal_limits_;  // of log lines, by tenant
};

}  // namespace tessera::residency
