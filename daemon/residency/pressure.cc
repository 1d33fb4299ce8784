#include "daemon/residency/pressure.h"

#include <algorithm>
#include <utility>

#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/config/limits.h"

namespace tessera::residency {

namespace {

constexpr Clock::Duration kQuiet = std::chrono::milliseconds(200);
constexpr Clock::Duration kPoll = std::chrono::milliseconds(1);
// Per call. The bytes requested from the ladder grow with every attempt; the last asks for
// everything.
constexpr int kAttempts = 10;
// Each waiting call occupies a handler thread, so further calls are refused at once. Each tenant
// has a share of these.
constexpr std::uint32_t kMostWaiting = 32;
// Per background job, so that tail absorption does not have to wait long.
constexpr std::uint64_t kBytesPerJob = 32 * kMiB;
constexpr std::uint64_t kAll = ~std::uint64_t{0};

std::uint64_t Percent(std::uint64_t bytes, std::uint32_t percent) {
  return bytes / 100 * percent + bytes % 100 * percent / 100;
}

}  // namespace

std::string_view OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kEnough:
      return "enough";
    case Outcome::kSome:
      return "some";
    case Outcome::kNothing:
      return "nothing";
  }
  return "unknown";
}

Pressure::Pressure(Options options)
    : options_(std::move(options)),
      waiting_(config::kTenants.max),
      refusals_(config::kTenants.max),
      refusal_limits_(config::kTenants.max) {
  TESSERA_CHECK(options_.low_percent <= options_.high_percent,
                "low_percent must not exceed high_percent");
  counters_.rungs = decltype(counters_.rungs)(options_.ladder.size());
  cache::Node& node = *options_.node;
  // Extents are charged in full however much of them is used, so only a refusal is informative.
  node.account().Watch(this, ~std::uint64_t{0});
  node.objects().Watch(this, Percent(node.options().memory_bytes, options_.high_percent));
  WatchTenants();
}

void Pressure::WatchTenants() {
  for (const std::unique_ptr<cache::Tenant>& tenant : options_.node->tenants()) {
    pool::Account& account = tenant->account();
    if (account.limit_bytes() == 0) continue;
    const std::uint64_t high = Percent(account.limit_bytes(), options_.high_percent);
    account.Watch(this, high);
    if (account.used_bytes() >= high) Pressed(account, 0);
  }
}

Pressure::~Pressure() {
  {
    MutexLock lock(pending_logs_mutex_);
    for (const auto& [occasion, unsaid] : pending_logs_) {
      if (unsaid.steps == 0 && unsaid.bytes == 0) continue;
      const auto& [rung, tenant, reason] = occasion;
      options_.logger->Log(LogLevel::kInfo, "memory pressure",
                           {{"reason", reason},
                            {"rung", options_.ladder[rung]->name()},
                            {"tenant", tenant},
                            {"moved_bytes", unsaid.bytes},
                            {"steps", unsaid.steps}});
    }
  }
  options_.node->account().Watch(nullptr, 0);
  options_.node->objects().Watch(nullptr, 0);
  for (const std::unique_ptr<cache::Tenant>& tenant : options_.node->tenants()) {
    tenant->account().Watch(nullptr, 0);
  }
}

// ---- who gives up memory

std::vector<Pressure::Payers> Pressure::PayersOf(cache::Tenant* asker, std::uint64_t asked) const {
  Payers above;
  Payers all;
  bool asker_above = false;
  for (const std::unique_ptr<cache::Tenant>& tenant : options_.node->tenants()) {
    const std::uint64_t used = tenant->account().used_bytes();
    const std::uint64_t soft = tenant->soft_limit_bytes();
    // What it has beyond its own part is lent, and taken back from whoever has most of it.
    all.push_back({tenant.get(), used - std::min(used, tenant->reserved_bytes())});
    const std::uint64_t wants = used + (tenant.get() == asker ? asked : 0);
    if (soft == 0 || wants <= soft) continue;
    asker_above = asker_above || tenant.get() == asker;
    if (used > soft) above.push_back({tenant.get(), used - soft});
  }
  const auto larger = [](const Payer& a, const Payer& b) { return a.most > b.most; };
  std::sort(above.begin(), above.end(), larger);
  if (asker_above) return {above, {{asker, kAll}}};
  std::sort(all.begin(), all.end(), larger);
  for (Payer& payer : all) {
    if (payer.tenant == asker || payer.tenant->reserved_bytes() == 0) payer.most = kAll;
  }
  return {above, all};
}

// ---- the ladder

// Returns the bytes that the tenant gave up.
std::uint64_t Pressure::ClimbRung(std::size_t rung, cache::Tenant& tenant, const Need& need,
                                  std::string_view reason, Climb& climb) {
  const Relief relief = options_.ladder[rung]->RelievePressure(tenant, need);
  const Outcome outcome = relief.bytes >= need.bytes ? Outcome::kEnough
                          : relief.bytes > 0         ? Outcome::kSome
                                                     : Outcome::kNothing;
  Counters::Rung& counters = counters_.rungs[rung];
  counters.climbs[static_cast<std::size_t>(outcome)].fetch_add(1);
  counters.steps.fetch_add(relief.steps);
  // A rung that freed nothing is worth a log line only if it is the last one.
  if (relief.steps > 0 || relief.bytes > 0 || rung + 1 == options_.ladder.size()) {
    Report(rung, tenant, reason, need.bytes, relief);
  }
  climb.bytes += relief.bytes;
  if (relief.bytes > 0 && std::ranges::find(climb.gave, &tenant) == climb.gave.end()) {
    climb.gave.push_back(&tenant);
  }
  if (outcome == Outcome::kEnough) return relief.bytes;
  if (relief.wait.has_value()) {
    climb.wait = std::min(climb.wait.value_or(*relief.wait), *relief.wait);
  }
  Append(climb.hindrances, climb.hindrances.empty() ? "" : "; ", "tenant ", tenant.name(), ": ",
         relief.hindrance);
  return relief.bytes;
}

Pressure::Climb Pressure::Relieve(std::vector<Payers> payers, const Need& need,
                                  std::string_view reason) {
  Climb climb;
  for (Payers& alike : payers) {
    for (std::size_t rung = 0; rung < options_.ladder.size(); ++rung) {
      for (Payer& payer : alike) {
        if (climb.bytes >= need.bytes) return climb;
        const std::uint64_t asked = std::min(need.bytes - climb.bytes, payer.most);
        if (asked == 0) continue;
        const std::uint64_t gave =
            ClimbRung(rung, *payer.tenant, {asked, need.urgency}, reason, climb);
        payer.most -= std::min(payer.most, gave);
      }
    }
  }
  return climb;
}

Pressure::Climb Pressure::RelieveFor(cache::Tenant& tenant, const pool::Shortage& shortage,
                                     const Need& need) {
  const std::string reason =
      Concat(shortage.account, " had no room for ", pool::TagName(shortage.tag));
  if (shortage.account == options_.node->account().name()) {
    return Relieve(PayersOf(&tenant, need.bytes), need, reason);
  }
  return Relieve({{{&tenant, kAll}}}, need, reason);
}

// The ladder frees pool memory only, not host memory with separate budgets.
bool Pressure::OfPool(const pool::Shortage& shortage) {
  return shortage.tag != pool::MemoryTag::kRawCopies &&
         shortage.tag != pool::MemoryTag::kObservations &&
         shortage.tag != pool::MemoryTag::kOffloaded;
}

void Pressure::CountRefusal(const cache::Tenant& tenant, const pool::Shortage& shortage) {
  Refusals& refusals = refusals_[tenant.options().id.value() - 1];
  const bool of_node = shortage.account == options_.node->account().name();
  (of_node ? refusals.node : refusals.quota).fetch_add(1, std::memory_order_relaxed);
  counters_.refused.fetch_add(1, std::memory_order_relaxed);
}

// ---- in a call

namespace {

// Frees what readers have released; returns true if something still waits for readers.
bool Collect(const std::vector<cache::Tenant*>& tenants) {
  bool waits = false;
  for (cache::Tenant* tenant : tenants) waits = tenant->epochs().Collect().has_value() || waits;
  return waits;
}

std::vector<cache::Tenant*> All(const cache::Node& node) {
  std::vector<cache::Tenant*> tenants;
  for (const std::unique_ptr<cache::Tenant>& tenant : node.tenants()) {
    tenants.push_back(tenant.get());
  }
  return tenants;
}

}  // namespace

// The caller's readers and those of tenants that gave up memory for it. If no tenant gave any, the
// readers of all tenants, because only they can still release memory.
std::vector<cache::Tenant*> Pressure::TenantsToWaitFor(cache::Tenant& tenant,
                                                       const pool::Shortage& shortage,
                                                       const Climb& climb) const {
  const bool of_node = shortage.account == options_.node->account().name();
  if (of_node && climb.gave.empty()) return All(*options_.node);
  std::vector<cache::Tenant*> tenants = climb.gave;
  tenants.push_back(&tenant);
  return tenants;
}

// Returns false if nothing was waiting for readers.
bool Pressure::WaitForReaders(const std::vector<cache::Tenant*>& tenants, Clock::TimePoint until,
                              absl::FunctionRef<bool()> gone) {
  bool waited = false;
  while (Collect(tenants)) {
    waited = true;
    if (options_.clock->Now() >= until || gone()) break;
    options_.pause(kPoll);
  }
  return waited;
}

absl::Status Pressure::RetryWhenPoolFull(cache::Tenant& tenant,
                                         absl::FunctionRef<absl::Status()> act,
                                         absl::FunctionRef<bool()> gone) {
  absl::Status status = act();
  std::optional<pool::Shortage> shortage = pool::ShortageOf(status);
  if (!shortage.has_value() || !OfPool(*shortage)) return status;
  if (!MayHelp(*shortage)) {
    CountRefusal(tenant, *shortage);
    return status;
  }
  const Clock::TimePoint begun = options_.clock->Now();
  const Clock::TimePoint overdue = begun + options_.patience / 2;
  const Clock::TimePoint until = begun + options_.patience;
  std::atomic<std::uint32_t>& waiting = waiting_[tenant.options().id.value() - 1];
  const bool waits = waiting.fetch_add(1) <
                     std::max<std::uint32_t>(1, kMostWaiting / options_.node->tenants().size());
  std::uint64_t found = 0;
  Climb climb;
  // One call per tenant at a time: two calls that need more than half of the pool each would
  // otherwise keep evicting each other's sequences.
  std::optional<MemoryWaiters::Place> place;
  for (int attempt = 0;
       attempt < kAttempts && shortage.has_value() && MayHelp(*shortage) && !gone();) {
    const Clock::TimePoint now = options_.clock->Now();
    if (place.has_value() && !place->first()) {
      if (now >= until) break;
      options_.pause(kPoll);
      continue;
    }
    climb = RelieveFor(tenant, *shortage,
                       {.bytes = std::max(shortage->asked, shortage->limit / 64) << attempt,
                        .urgency = now < overdue ? Urgency::kCall : Urgency::kOverdue});
    found += climb.bytes;
    const std::vector<cache::Tenant*> whose = TenantsToWaitFor(tenant, *shortage, climb);
    const bool readers = waits ? WaitForReaders(whose, until, gone) : Collect(whose);
    if (climb.bytes > 0 || readers) {
      ++attempt;
      status = act();
      shortage = pool::ShortageOf(status);
    } else if (waits && climb.wait.has_value() && now < until) {
      // Not counted as an attempt: nothing could be freed yet. Once the call is overdue, sequences
      // in use may be offloaded too.
      const Clock::Duration most = now < overdue ? overdue - now : kPoll;
      options_.pause(std::min(std::max(*climb.wait, kPoll), most));
    } else {
      break;
    }
    if (waits && !place.has_value()) place.emplace(line_, tenant.options().id);
  }
  place.reset();
  waiting.fetch_sub(1);
  if (!shortage.has_value()) {
    counters_.served.fetch_add(status.ok(), std::memory_order_relaxed);
    return status;
  }
  if (OfPool(*shortage)) CountRefusal(tenant, *shortage);
  ReportRefusal(tenant, *shortage, climb);
  ErrorInfo info = CauseOf(status).value_or(ErrorInfo{.cause = ErrorCause::kPoolFull});
  info.retry_after = std::chrono::duration_cast<std::chrono::milliseconds>(
                         climb.wait.value_or(options_.patience)) +
                     std::chrono::milliseconds(1);
  return WithCause(absl::ResourceExhaustedError(
                       Concat(AsStringView(status.message()), ". Memory freed for this call: ",
                              FormatBytes(found), climb.hindrances.empty() ? "" : "; then ",
                              climb.hindrances, ". Retry in ", info.retry_after.count(), " ms")),
                   info);
}

// ---- in the background

void Pressure::Pressed(const pool::Account& account, std::uint64_t missing) {
  // A refusal by a tenant's own limit needs no entry here: that account is above its watermark, or
  // the request exceeds what the watermark keeps free.
  if (&account == &options_.node->account()) {
    std::uint64_t before = missing_.load(std::memory_order_relaxed);
    while (before < missing && !missing_.compare_exchange_weak(before, missing)) {
    }
  }
  if (options_.clock->Now().time_since_epoch().count() < quiet_until_.load()) return;
  if (!queued_.exchange(true)) Queue();
}

void Pressure::Queue() {
  options_.scheduler->Submit({.name = "relieve", .priority = JobPriority::kPressure},
                             [this] { RelieveInBackground(); });
}

void Pressure::RelieveInBackground() {
  queued_.store(false);
  (void)Collect(All(*options_.node));
  const std::uint64_t missing = missing_.exchange(0);
  std::uint64_t found = 0;
  std::uint64_t wanted = 0;
  // Bytes above the low watermark that are not already waiting for readers.
  const auto excess = [&](std::uint64_t used, std::uint64_t limit, std::uint64_t retired) {
    if (limit == 0 || used < Percent(limit, options_.high_percent)) return std::uint64_t{0};
    const std::uint64_t low = Percent(limit, options_.low_percent) + retired;
    return used > low ? used - low : std::uint64_t{0};
  };
  const auto relieve = [&](std::vector<Payers> payers, std::uint64_t bytes,
                           std::string_view reason) {
    if (bytes == 0) return;
    wanted += bytes;
    found += Relieve(std::move(payers), {.bytes = std::min(bytes, kBytesPerJob)}, reason).bytes;
  };
  std::uint64_t retired = 0;
  for (const std::unique_ptr<cache::Tenant>& tenant : options_.node->tenants()) {
    const pool::Account& account = tenant->account();
    const std::uint64_t waiting = tenant->epochs().waiting_bytes();
    retired += waiting;
    relieve({{{tenant.get(), kAll}}}, excess(account.used_bytes(), account.limit_bytes(), waiting),
            "a tenant is above its high watermark");
  }
  const std::uint64_t used = options_.node->objects().used_bytes();
  relieve(PayersOf(nullptr, 0),
          excess(used, options_.node->options().memory_bytes, retired + found),
          "the node is above its high watermark");
  if (wanted == 0 && missing > retired) {
    relieve(PayersOf(nullptr, 0), missing, "background work ran out of memory");
  }
  if (wanted == 0) return;
  if (found == 0) {
    quiet_until_.store((options_.clock->Now() + kQuiet).time_since_epoch().count());
  } else if (found < wanted && !queued_.exchange(true)) {
    Queue();
  }
}

// ---- logging

void Pressure::Report(std::size_t rung, const cache::Tenant& tenant, std::string_view reason,
                      std::uint64_t asked, const Relief& relief) {
  std::uint64_t moved = 0;
  std::uint64_t steps = 0;
  std::optional<std::uint64_t> before;
  {
    MutexLock lock(pending_logs_mutex_);
    PendingLog& unsaid = pending_logs_[{rung, tenant.name(), std::string(reason)}];
    unsaid.steps += relief.steps;
    unsaid.bytes += relief.bytes;
    before = unsaid.seldom.Say(options_.clock->Now());
    if (!before.has_value()) return;
    moved = std::exchange(unsaid.bytes, 0);
    steps = std::exchange(unsaid.steps, 0);
  }
  options_.logger->Log(moved > 0 || relief.steps > 0 ? LogLevel::kInfo : LogLevel::kWarning,
                       "memory pressure",
                       {{"reason", reason},
                        {"rung", options_.ladder[rung]->name()},
                        {"tenant", tenant.name()},
                        {"asked_bytes", asked},
                        {"moved_bytes", moved},
                        {"steps", steps},
                        {"hindrance", relief.hindrance},
                        {"climbs", *before + 1}});
}

void Pressure::ReportRefusal(const cache::Tenant& tenant, const pool::Shortage& shortage,
                             const Climb& climb) {
  const std::optional<std::uint64_t> before =
      refusal_limits_[tenant.options().id.value() - 1].Say(options_.clock->Now());
  if (!before.has_value()) return;
  options_.logger->Log(LogLevel::kWarning, "call refused: no memory could be freed",
                       {{"tenant", tenant.name()},
                        {"account", shortage.account},
                        {"for", pool::TagName(shortage.tag)},
                        {"asked_bytes", shortage.asked},
                        {"limit_bytes", shortage.limit},
                        {"hindrance", climb.hindrances},
                        {"calls", *before + 1}});
}

}  // namespace tessera::residency
