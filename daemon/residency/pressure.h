// Memory under pressure: when the ladder is climbed, for whom, and at whose expense.
//
//   in the background   an account above its high watermark, or a request that was refused, queues
//                       the job "relieve", which climbs until the account is below the low one
//   in a call           an operation that is refused for want of pool memory has the ladder climbed
//                       for what it asked, waits a bounded time for readers, and is tried again
//
// Who pays: of the node's memory first those tenants that are above their soft limits, as far as
// these; then, unless whoever asks is above its own, all of them. Of a tenant's own limit that
// tenant alone. Among those who pay alike a rung is climbed with all, who holds most first, before
// the next one is with any: none of them loses channels while another's unused prefixes lie there.
//
// Takes no lock of cache or pool while it is told of pressure, and holds none while it relieves it.
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

// How a climb on one rung ended.
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
    // Lets time pass in a call that waits for readers, or for a sequence to become idle.
    std::function<void(Clock::Duration)> pause;
    std::uint32_t high_percent = 90;  // of a limit
    std::uint32_t low_percent = 80;
    Clock::Duration patience = std::chrono::seconds(2);  // of a call, in all
    // Rungs, the cheapest first.
    std::vector<std::unique_ptr<Measure>> ladder;
  };
  // Watches the accounts of the node and its tenants from now on.
  explicit Pressure(Options options);
  // Nobody calls it any more, and its scheduler runs no job of it.
  ~Pressure() override;

  void Pressed(const pool::Account& account, std::uint64_t missing) override;

  // Has `act` done for the tenant: again, as often as memory is found for it, where it answers that
  // pool memory is short; a bounded number of times, and until `gone`. The last answer then says
  // what was tried and what would help. `act` changes nothing where it fails, and is called without
  // any lock; so is this.
  absl::Status WithRelief(cache::Tenant& tenant, absl::FunctionRef<absl::Status()> act,
                          absl::FunctionRef<bool()> gone);

  struct Counters {
    // By rung, in the ladder's order.
    struct Rung {
      std::array<std::atomic<std::uint64_t>, kOutcomes> climbs{};
      std::atomic<std::uint64_t> steps{0};  // Relief::steps
    };
    std::vector<Rung> rungs;
    std::atomic<std::uint64_t> served{0};   // calls that found room on a later attempt
    std::atomic<std::uint64_t> refused{0};  // calls that did not
  };
  const Counters& counters() const { return counters_; }
  const std::vector<std::unique_ptr<Measure>>& ladder() const { return options_.ladder; }

 private:
  // What a climb has come to.
  struct Climb {
    std::uint64_t bytes = 0;
    std::string hindrances;
    std::optional<Clock::Duration> wait;
    std::vector<cache::Tenant*> gave;
  };
  // Who may be made to pay, and how much each: those who pay alike, before those who pay where
  // that was not enough.
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
  bool MayHelp(const pool::Shortage& shortage) const;
  std::vector<cache::Tenant*> WhoseReaders(cache::Tenant& tenant, const pool::Shortage& shortage,
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
  // Where the ladder had nothing to give, asking again at once is idle.
  std::atomic<std::int64_t> quiet_until_{0};
  std::vector<std::atomic<std::uint32_t>> waiting_;  // calls that wait now, by tenant
  WaitingLine line_;                                 // of those that did not get room at once
  // What was done and not said yet, by rung, tenant and reason, of which there are few: a line
  // tells all that came since the last one, and there is one a second at most. What is left is said
  // at the end.
  struct Unsaid {
    Seldom seldom;
    std::uint64_t steps = 0;
    std::uint64_t bytes = 0;
  };
  using Occasion = std::tuple<std::size_t, std::string, std::string>;
  Mutex unsaid_mutex_;
  std::map<Occasion, Unsaid> unsaid_ TESSERA_GUARDED_BY(unsaid_mutex_);
  std::vector<Seldom> refusals_;  // by tenant
};

}  // namespace tessera::residency
