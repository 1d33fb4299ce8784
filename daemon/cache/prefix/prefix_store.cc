#include "daemon/cache/prefix/prefix_store.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string_view>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

}  // namespace

PrefixScope ScopeOf(const std::string& tenant, const Model& model, const std::string& policy,
                    bool keeps_every_token, const std::string& salt) {
  const std::string& name = model.spec().name;
  PrefixScope scope = {.text = Concat("tenant ", tenant, "\nmodel ", name.size(), " ", name, " ",
                                      model.fingerprint(), "\npolicy ", policy),
                       .every_boundary = keeps_every_token};
  if (!salt.empty()) Append(scope.text, "\nsalt ", salt.size(), " ", salt);
  // Events name neither salts nor adapters: routers would take these blocks for those of others.
  if (keeps_every_token && salt.empty() && model.spec().adapter_id.empty()) scope.model = name;
  return scope;
}

PrefixStore::PrefixStore(const Options& options)
    : options_(options),
      due_(kNever),
      set_({.hash = options.hash,
            .account = options.account,
            .max_prefixes = options.max_prefixes,
            .tenant = options.tenant,
            .on_blocks = [this](const PrefixChain& chain, const std::vector<BlockEvent>& events) {
              Tell(chain, events);
            }}) {}

PrefixStore::~PrefixStore() {
  DeferredWork after(*this);
  MutexLock lock(mutex_);
  Refuse([](const Waiting&) { return true; },
         WithCause(absl::UnavailableError("the daemon is shutting down"), ErrorCause::kDraining),
         after);
  while (!agreements_.empty()) Forget(agreements_.begin(), after);
  for (auto& [session, found] : kept_) {
    for (Kept& kept : found) after.gone.push_back(std::move(kept.prefix));
  }
  kept_.clear();
  set_.Clear(after.gone);
  after.attention = false;
}

PrefixStore::DeferredWork::~DeferredWork() {
  for (auto& [done, answer] : answers) std::move(done)(std::move(answer));
  if (attention && store.options_.on_attention) store.options_.on_attention();
}

// ---- sessions

void PrefixStore::SessionOpened(SessionId id, Place place) {
  if (place.group_size <= 1) {
    place.group.clear();
    place.rank = 0;
    place.group_size = 1;
  }
  MutexLock lock(mutex_);
  const bool is_known = Finds(place.worker, place.rank, place.group_size);
  const std::string worker = place.worker;
  places_[id] = std::move(place);
  if (!is_known) TellAll(worker);
}

void PrefixStore::SessionEnded(SessionId id) {
  DeferredWork after(*this);
  MutexLock lock(mutex_);
  const auto it = places_.find(id);
  if (it == places_.end()) return;
  const Place place = std::move(it->second);
  places_.erase(it);
  if (!Finds(place.worker, place.rank, place.group_size)) TellAll(place.worker);
  Refuse([id](const Waiting& question) { return question.session == id; },
         absl::UnauthenticatedError(Concat(id.ToString(), " has ended")), after);
  if (place.group_size > 1) {
    // An agreement that includes a departed rank no longer applies.
    const std::string asker = AskerOf(id, place);
    Refuse([&asker](const Waiting& question) { return question.asker == asker; },
           absl::AbortedError(Concat("rank ", place.rank, " of the group has disconnected; retry")),
           after);
    for (auto agreement = agreements_.begin(); agreement != agreements_.end();) {
      const auto next = std::next(agreement);
      if ((*agreement)->asker == asker) Forget(agreement, after);
      agreement = next;
    }
  }
  if (const auto found = kept_.find(id); found != kept_.end()) {
    for (const Kept& kept : found->second) LetGo(kept.prefix, after);
    kept_.erase(found);
  }
  if (computations_.EndSession(id)) Settle(options_.clock->Now(), after);
}

void PrefixStore::Retell(const std::string& worker) {
  MutexLock lock(mutex_);
  TellAll(worker);
}

bool PrefixStore::Finds(const std::string& worker, std::uint32_t rank,
                        std::uint32_t group_size) const {
  return std::any_of(places_.begin(), places_.end(), [&](const auto& entry) {
    const Place& place = entry.second;
    return place.worker == worker && place.rank == rank && place.group_size == group_size;
  });
}

void PrefixStore::Tell(const PrefixChain& chain, const std::vector<BlockEvent>& events) {
  if (options_.blocks == nullptr) return;
  std::set<std::string_view> workers;  // several sessions may be one worker to routers
  for (const auto& [id, place] : places_) {
    if (place.rank == chain.rank && place.group_size == chain.group_size) {
      workers.insert(place.worker);
    }
  }
  workers.erase("");
  for (const std::string_view worker : workers) {
    options_.blocks->Changed({options_.tenant, std::string(worker)}, chain.model, events);
  }
}

void PrefixStore::TellAll(const std::string& worker) {
  if (options_.blocks == nullptr || worker.empty()) return;
  const BlockReader reader = {options_.tenant, worker};
  const bool is_here = std::any_of(places_.begin(), places_.end(), [&](const auto& entry) {
    return entry.second.worker == worker;
  });
  if (!is_here) return options_.blocks->Left(reader);
  options_.blocks->Cleared(reader);
  set_.index().VisitBlocks([&](const PrefixChain& chain, const std::vector<BlockEvent>& events) {
    if (Finds(worker, chain.rank, chain.group_size)) {
      options_.blocks->Changed(reader, chain.model, events);
    }
  });
}

absl::StatusOr<PrefixStore::Place> PrefixStore::PlaceOf(SessionId id) const {
  const auto it = places_.find(id);
  if (it != places_.end()) return it->second;
  return absl::UnauthenticatedError(Concat(id.ToString(), " has ended"));
}

std::string PrefixStore::AskerOf(SessionId id, const Place& place) {
  return place.group_size > 1 ? Concat("group of ", place.group_size, ": ", place.group)
                              : id.ToString();
}

namespace {

PrefixChain ChainOfRank(const PrefixScope& scope, std::uint32_t rank, std::uint32_t group_size) {
  return {.start = Concat(scope.text, "\nrank ", rank, " of ", group_size),
          .every_boundary = scope.every_boundary,
          .model = scope.model,
          .rank = rank,
          .group_size = group_size};
}

}  // namespace

std::vector<PrefixChain> PrefixStore::ChainsOf(const PrefixScope& scope, const Place& place) {
  std::vector<PrefixChain> chains;
  for (std::uint32_t rank = 0; rank < place.group_size; ++rank) {
    chains.push_back(ChainOfRank(scope, rank, place.group_size));
  }
  return chains;
}

absl::StatusOr<PrefixChain> PrefixStore::ChainOf(SessionId session,
                                                 const PrefixScope& scope) const {
  MutexLock lock(mutex_);
  const absl::StatusOr<Place> place = PlaceOf(session);
  if (!place.ok()) return place.status();
  return ChainOfRank(scope, place->rank, place->group_size);
}

// ---- publishing

std::shared_ptr<Prefix> PrefixStore::Find(const PrefixChain& chain, Ids ids) const {
  MutexLock lock(mutex_);
  const PrefixIndex::Match match = set_.index().Longest(chain, ids, ids.size());
  if (match.tokens != ids.size() || !match.prefix.valid()) return nullptr;
  return set_.Find(match.prefix)->prefix;
}

absl::StatusOr<PrefixStore::Published> PrefixStore::Publish(Publication publication) {
  const std::uint64_t tile_bytes =
      publication.frozen == nullptr ? 0 : publication.frozen->Describe(/*lanes=*/false).tile_bytes;
  DeferredWork after(*this);
  std::shared_ptr<Prefix> prefix;  // outlives the lock, whether published or not
  MutexLock lock(mutex_);
  const absl::StatusOr<Place> place = PlaceOf(publication.session);
  if (!place.ok()) return place.status();
  const Clock::TimePoint now = options_.clock->Now();
  bool existed = false;
  const PrefixId known = set_.index().FindEnd(publication.chain, publication.ids);
  if (PrefixSet::Entry* const entry = set_.Find(known)) {
    existed = true;
    set_.Extend(*entry, publication.life);
    set_.Touch(*entry, now);
    prefix = entry->prefix;
  } else if (publication.frozen == nullptr) {
    return Published();
  } else {
    prefix = std::make_shared<Prefix>(
        Prefix::Options{.sequence = publication.frozen,
                        .chain = publication.chain,
                        .policy = std::move(publication.policy),
                        .rank = place->rank,
                        .group_size = place->group_size,
                        .tokens = publication.ids.size(),
                        .tile_bytes = tile_bytes,
                        .published = now,
                        .forks = std::make_shared<PrefixForks>([this] { ForkEnded(); })});
    absl::Status added = set_.Add(prefix, publication.ids, publication.life, now, after.gone);
    if (!added.ok()) return added;
  }
  ++(existed ? counted_.deduplicated : counted_.published);
  if (publication.life.ttl != Clock::Duration::zero()) {
    may_expire_.store(true);
    DueAt(now + publication.life.ttl, after);
  }
  computations_.Published(publication.session, publication.chain, publication.ids);
  Settle(now, after);
  return Published{.prefix = prefix, .existed = existed};
}

// ---- forks

PrefixStore::Kept* PrefixStore::FindKept(std::list<Kept>& found, PrefixId id) {
  const auto kept = std::find_if(found.begin(), found.end(), [id](const Kept& candidate) {
    return candidate.prefix->id() == id;
  });
  return kept == found.end() ? nullptr : &*kept;
}

absl::StatusOr<PrefixStore::ForFork> PrefixStore::TakeForFork(PrefixId id, SessionId session) {
  MutexLock lock(mutex_);
  PrefixSet::Entry* const entry = set_.Find(id);
  std::shared_ptr<Prefix> prefix = entry == nullptr ? nullptr : entry->prefix;
  const auto found = kept_.find(session);
  Kept* const kept = found == kept_.end() ? nullptr : FindKept(found->second, id);
  if (prefix == nullptr) {
    if (kept == nullptr) return absl::NotFoundError(Concat("no ", id.ToString()));
    prefix = kept->prefix;
  }
  ForkHold hold(prefix->options().forks);
  if (entry != nullptr) set_.Touch(*entry, options_.clock->Now());
  return ForFork{.prefix = std::move(prefix), .hold = std::move(hold)};
}

void PrefixStore::Forked(PrefixId id, SessionId session) {
  DeferredWork after(*this);
  MutexLock lock(mutex_);
  const auto found = kept_.find(session);
  Kept* const kept = found == kept_.end() ? nullptr : FindKept(found->second, id);
  if (kept == nullptr || --kept->times > 0) return;
  LetGo(kept->prefix, after);
  found->second.remove_if([kept](const Kept& candidate) { return &candidate == kept; });
}

void PrefixStore::ForkEnded() {
  if (!may_expire_.load()) return;
  due_.store(0);
  if (options_.on_attention) options_.on_attention();
}

// ---- dropping

bool PrefixStore::Free(PrefixId id) {
  DeferredWork after(*this);
  MutexLock lock(mutex_);
  if (set_.Find(id) == nullptr) return false;
  set_.Drop(id, DropReason::kFreed, after.gone);
  return true;
}

std::vector<PrefixId> PrefixStore::ListUnused() const {
  std::vector<PrefixId> unused;
  MutexLock lock(mutex_);
  for (const PrefixSet::Entry& entry : set_.entries()) {
    if (entry.droppable()) unused.push_back(entry.prefix->id());
  }
  return unused;
}

std::shared_ptr<Prefix> PrefixStore::FindUnused(PrefixId id) const {
  MutexLock lock(mutex_);
  const PrefixSet::Entry* const entry = set_.Find(id);
  return entry == nullptr || !entry->droppable() ? nullptr : entry->prefix;
}

std::optional<std::uint64_t> PrefixStore::DropUnused(PrefixId id) {
  DroppedPrefixes gone;
  {
    MutexLock lock(mutex_);
    const PrefixSet::Entry* const entry = set_.Find(id);
    if (entry == nullptr || !entry->droppable()) return std::nullopt;
    set_.Drop(id, DropReason::kLeastRecentlyUsed, gone);
  }
  const Sequence::Description held = gone.front()->sequence().Describe(/*lanes=*/false);
  return held.tile_bytes - held.shared_tile_bytes;
}

bool PrefixStore::DropLeastRecentlyStored(PrefixId older_than) {
  DroppedPrefixes gone;
  MutexLock lock(mutex_);
  return set_.DropLeastRecentlyStored(older_than, gone);
}

bool PrefixStore::Withdraw(ComputationId computation, SessionId session) {
  DeferredWork after(*this);
  MutexLock lock(mutex_);
  if (!computations_.Withdraw(computation, session)) return false;
  Settle(options_.clock->Now(), after);
  return true;
}

void PrefixStore::DueAt(Clock::TimePoint when, DeferredWork& after) {
  const std::int64_t wanted = when.time_since_epoch().count();
  std::int64_t due = due_.load();
  while (wanted < due && !due_.compare_exchange_weak(due, wanted)) {
  }
  after.attention = after.attention || wanted < due;
}

std::optional<Clock::Duration> PrefixStore::Sweep() {
  const Clock::TimePoint now = options_.clock->Now();
  const auto left = [&]() -> std::optional<Clock::Duration> {
    const std::int64_t due = due_.load();
    if (due == kNever) return std::nullopt;
    return std::max(Clock::Duration(due) - now.time_since_epoch(), Clock::Duration::zero());
  };
  if (due_.load() > now.time_since_epoch().count()) return left();
  DeferredWork after(*this);
  {
    MutexLock lock(mutex_);
    due_.store(kNever);  // later calls that lower it take effect in the next sweep
    for (auto& [session, found] : kept_) {
      for (auto kept = found.begin(); kept != found.end();) {
        if (kept->until > now) {
          DueAt(kept->until, after);
          ++kept;
          continue;
        }
        LetGo(kept->prefix, after);
        kept = found.erase(kept);
      }
    }
    for (auto it = agreements_.begin(); it != agreements_.end();) {
      const auto next = std::next(it);
      if ((*it)->found.has_value()) {
        if ((*it)->until <= now) {
          Forget(it, after);
        } else {
          DueAt((*it)->until, after);
        }
      }
      it = next;
    }
    Settle(now, after);
    for (const Waiting& question : waiting_) DueAt(question.deadline, after);
    if (const auto next = set_.Expire(now, after.gone)) DueAt(*next, after);
  }
  after.attention = false;  // the caller of Sweep gets the time as the result
  return left();
}

// ---- inspection

std::vector<PrefixStore::Description> PrefixStore::List() const {
  const Clock::TimePoint now = options_.clock->Now();
  std::vector<Description> list;
  MutexLock lock(mutex_);
  for (const PrefixSet::Entry& entry : set_.entries()) {
    list.push_back({.prefix = entry.prefix,
                    .life = entry.life,
                    .idle = std::max(now - entry.used, Clock::Duration::zero())});
  }
  return list;
}

PrefixStore::Figures PrefixStore::figures() const {
  MutexLock lock(mutex_);
  Figures figures = counted_;
  figures.prefixes = set_.entries().size();
  figures.tile_bytes = set_.tile_bytes();
  figures.waiting = waiting_.size();
  figures.computations = computations_.size();
  figures.index_nodes = set_.index().nodes();
  for (std::size_t i = 0; i < kDropReasons; ++i) {
    figures.dropped[i] = set_.dropped(static_cast<DropReason>(i));
  }
  return figures;
}

}  // namespace tessera::cache
