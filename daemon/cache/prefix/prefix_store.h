// `PrefixStore` manages a tenant's published prefixes and the calls that ask for them. It tracks
// prefixes that were found but not yet forked, announced computations, callers that wait for them,
// and the answers that ranks of a tensor-parallel group have agreed on.
//
//   Match ──▶ found, or no other session computes a longer match ──▶ answered at once
//         `─▶ another session computes a longer match, and the call may wait ──▶ a question,
//             answered on publication, when the computation is abandoned, or at its deadline
//
// A question occupies no thread and holds no lock: the call that changes what it waits for answers
// it. Time advances only in Sweep, by the injected clock.
//
// Thread-safe. `mutex_` is a leaf except for the account's lock. No memory is freed and no callback
// runs under it; the call that caused them does both after releasing it (DeferredWork).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/prefix/computations.h"
#include "daemon/cache/prefix/prefix.h"
#include "daemon/cache/prefix/prefix_set.h"
#include "daemon/metrics/instruments.h"

namespace tessera::cache {

// Identifies the prefixes that may match, besides token ids and rank.
struct PrefixScope {
  std::string text;
  bool every_boundary = false;  // the policy keeps every token
  std::string model;            // its name, if routers may hear of these prefixes
};
// `salt`: sets the prefixes of some sessions apart; empty: none.
PrefixScope ScopeOf(const std::string& tenant, const Model& model, const std::string& policy,
                    bool keeps_every_token, const std::string& salt = "");

class PrefixStore {
 public:
  using Ids = PrefixIndex::Ids;

  // How long a found prefix is kept for a session that has not forked it yet.
  static constexpr Clock::Duration kKept = std::chrono::seconds(30);
  // Per session; beyond it, the oldest is released.
  static constexpr std::size_t kMaxKeptPerSession = 64;
  // How long an agreed answer waits for the remaining ranks of a group.
  static constexpr Clock::Duration kAgreed = std::chrono::seconds(30);
  static constexpr std::size_t kMaxAgreementsPerGroup =
      256;                                           // per group; beyond it, the oldest is dropped
  static constexpr std::size_t kMaxQuestions = 256;  // waiting; more are answered at once
  static constexpr std::uint32_t kMaxRanks = 1024;

  struct Options {
    std::string tenant;
    PrefixHash hash;
    pool::Account* account;
    const Clock* clock;
    std::uint32_t max_prefixes;
    std::function<std::uint64_t()> next_id;
    // Called when Sweep should run earlier than its last result said.
    std::function<void()> on_attention;
    metrics::DurationHistogram* waits = nullptr;  // of questions; null: not counted
    BlockEventSink* blocks = nullptr;             // hears what each worker finds; null: nobody does
  };
  explicit PrefixStore(const Options& options);
  ~PrefixStore();

  // ---- sessions: every caller has one

  struct Place {
    std::string group;
    std::uint32_t rank = 0;
    std::uint32_t group_size = 1;
    std::string worker;  // the name that routers know it by; empty: none do
  };
  void SessionOpened(SessionId id, Place place);
  // Drops the session's computations, questions and found prefixes. Published prefixes are kept.
  void SessionEnded(SessionId id);
  // Tells Options::blocks anew what this worker finds.
  void Retell(const std::string& worker);

  // ---- publishing

  // The chain under which the session's prefixes are found. UNAUTHENTICATED if the session has
  // ended.
  absl::StatusOr<PrefixChain> ChainOf(SessionId session, const PrefixScope& scope) const;
  // Returns a prefix that begins with these ids, preferably one that ends there; null if there is
  // none.
  std::shared_ptr<Prefix> Find(const PrefixChain& chain, Ids ids) const;

  struct Publication {
    SessionId session;
    PrefixChain chain;
    std::string policy;
    Ids ids;
    PrefixLife life;
    // A frozen sequence held only by the caller; freed if it is not needed. Null: publish only if
    // the prefix already exists.
    std::shared_ptr<Sequence> frozen;
  };
  struct Published {
    std::shared_ptr<Prefix> prefix;  // null: not published
    bool existed = false;            // it was already published; the longer life applies
  };
  absl::StatusOr<Published> Publish(Publication publication);

  // ---- matching

  struct Question {
    SessionId session;
    PrefixScope scope;
    std::vector<std::uint32_t> ids;  // not empty
    Clock::Duration wait{};
    bool will_compute = false;
  };
  struct Answer {
    PrefixId prefix;  // invalid: no match
    std::uint64_t tokens = 0;
    std::uint64_t computing = 0;  // if greater than `tokens`, what other sessions are computing
    ComputationId computation;    // this session's, if it computes the rest
  };
  using Done = absl::AnyInvocable<void(absl::StatusOr<Answer>) &&>;
  // Calls `done` exactly once. Returns 0 if it was called before returning; otherwise a later call
  // invokes it on its own thread, and the result is the ticket for Cancel.
  std::uint64_t Match(Question question, Done done);
  // Answers the question with CANCELLED unless it has been answered.
  void Cancel(std::uint64_t question);
  // Returns false if the session has no such computation.
  bool Withdraw(ComputationId computation, SessionId session);

  // ---- forks

  struct ForFork {
    std::shared_ptr<Prefix> prefix;
    ForkHold hold;
  };
  // Returns NOT_FOUND if the prefix is neither published nor kept for the session. It remains kept
  // until Forked is called, so that a refused fork can be retried.
  absl::StatusOr<ForFork> TakeForFork(PrefixId id, SessionId session);
  void Forked(PrefixId id, SessionId session);

  // ---- dropping

  // Unpublishes a prefix. Returns false if there is none.
  bool Free(PrefixId id);
  // Prefixes that are neither pinned nor in use, least recently used first.
  std::vector<PrefixId> ListUnused() const;
  // One of them; null if it is in use or gone by now. Release it without a lock: who holds it when
  // it is dropped frees its memory.
  std::shared_ptr<Prefix> FindUnused(PrefixId id) const;
  // Drops one of them, unless it is in use by now, and returns the pool bytes of the tiles that
  // only it held. nullopt: it was not dropped.
  std::optional<std::uint64_t> DropUnused(PrefixId id);
  // Drops the least recently used one of those in the host tier. Valid `older_than`: only if it was
  // used less recently than this prefix. Returns false if there is none.
  bool DropLeastRecentlyStored(PrefixId older_than = PrefixId());
  // Handles everything that is due by now. Returns the time until the next call is needed.
  std::optional<Clock::Duration> Sweep();

  // ---- inspection

  struct Description {
    std::shared_ptr<Prefix> prefix;
    PrefixLife life;
    Clock::Duration idle{};
  };
  // Least recently used first.
  std::vector<Description> List() const;
  struct Figures {
    std::uint64_t prefixes = 0;
    std::uint64_t tile_bytes = 0;
    std::uint64_t waiting = 0;       // questions
    std::uint64_t computations = 0;  // announced by sessions
    std::uint64_t index_nodes = 0;
    // Counters since start.
    std::uint64_t published = 0;
    std::uint64_t deduplicated = 0;
    std::uint64_t matches_whole = 0;
    std::uint64_t matches_part = 0;
    std::uint64_t matches_nothing = 0;
    std::uint64_t tokens_asked = 0;
    std::uint64_t tokens_found = 0;
    std::array<std::uint64_t, kDropReasons> dropped{};
  };
  Figures figures() const;

 private:
  // The common answer to one question for all ranks of a group. Each rank consumes the oldest
  // agreement that it has not asked for yet; asking the same again is a new question.
  struct Agreement {
    std::string asker;
    std::string scope;
    std::shared_ptr<TokenList> tokens;
    std::vector<bool> asked;                    // by rank
    std::optional<std::uint64_t> found;         // nullopt: a rank still waits
    std::vector<std::shared_ptr<Prefix>> owed;  // by rank; kept for those that have not asked yet
    Clock::TimePoint until;
  };
  struct Waiting {
    std::uint64_t ticket;
    SessionId session;
    std::string asker;
    std::string scope;
    std::uint32_t rank;
    std::vector<PrefixChain> chains;  // by rank
    std::shared_ptr<TokenList> tokens;
    bool will_compute;
    Clock::TimePoint deadline;
    std::shared_ptr<Agreement> agreement;  // for groups only
    Done done;
  };
  struct Kept {
    std::shared_ptr<Prefix> prefix;
    std::uint32_t times = 0;  // times it was found but not yet forked
    Clock::TimePoint until;
  };
  // Work that a call does after it releases the lock: first answers, then frees.
  struct DeferredWork {
    explicit DeferredWork(const PrefixStore& of) : store(of) {}
    ~DeferredWork();
    const PrefixStore& store;
    bool attention = false;
    DroppedPrefixes gone;
    std::vector<std::pair<Done, absl::StatusOr<Answer>>> answers;
  };

  absl::StatusOr<Place> PlaceOf(SessionId id) const TESSERA_REQUIRES(mutex_);
  // Whether a session of this worker finds the blocks of chains of this rank.
  bool Finds(const std::string& worker, std::uint32_t rank, std::uint32_t group_size) const
      TESSERA_REQUIRES(mutex_);
  void Tell(const PrefixChain& chain, const std::vector<BlockEvent>& events)
      TESSERA_REQUIRES(mutex_);
  void TellAll(const std::string& worker) TESSERA_REQUIRES(mutex_);
  static std::string AskerOf(SessionId id, const Place& place);
  static std::vector<PrefixChain> ChainsOf(const PrefixScope& scope, const Place& place);
  // Charges a list once, before it is remembered.
  // `done`, which also reports to options_.waits how long the question waited.
  Done Timed(Done done, Clock::TimePoint begun) const;
  absl::Status Remember(TokenList& tokens);
  void DueAt(Clock::TimePoint when, DeferredWork& after);
  void ForkEnded();

  // prefix_match.cc
  absl::Status JoinAgreement(Waiting& question, Clock::TimePoint now, DeferredWork& after)
      TESSERA_REQUIRES(mutex_);
  // Number of leading tokens that all ranks have, or (computed_too) will have once announced
  // computations are published.
  std::uint64_t Longest(const Waiting& question, bool computed_too) const TESSERA_REQUIRES(mutex_);
  // nullopt: the question continues to wait.
  std::optional<Answer> TryAnswer(Waiting& question, bool may_wait, Clock::TimePoint now,
                                  DeferredWork& after) TESSERA_REQUIRES(mutex_);
  void Agree(Agreement& agreement, const Waiting& question, std::uint64_t found,
             Clock::TimePoint now, DeferredWork& after) TESSERA_REQUIRES(mutex_);
  void Count(const Waiting& question, const Answer& answer) TESSERA_REQUIRES(mutex_);
  // Answers every question that can be answered by now.
  void Settle(Clock::TimePoint now, DeferredWork& after) TESSERA_REQUIRES(mutex_);
  void Refuse(const std::function<bool(const Waiting&)>& whom, const absl::Status& why,
              DeferredWork& after) TESSERA_REQUIRES(mutex_);
  void KeepFor(SessionId session, const std::shared_ptr<Prefix>& prefix, Clock::TimePoint now,
               DeferredWork& after) TESSERA_REQUIRES(mutex_);
  static Kept* FindKept(std::list<Kept>& found, PrefixId id);
  void LetGo(const std::shared_ptr<Prefix>& prefix, DeferredWork& after) TESSERA_REQUIRES(mutex_);
  void Forget(std::list<std::shared_ptr<Agreement>>::iterator agreement, DeferredWork& after)
      TESSERA_REQUIRES(mutex_);

  const Options options_;
  // When Sweep is next due, in nanoseconds of the clock. Any thread may lower it.
  std::atomic<std::int64_t> due_;
  std::atomic<bool> may_expire_{false};  // some prefix has had a time to live

  mutable Mutex mutex_;
  PrefixSet set_ TESSERA_GUARDED_BY(mutex_);
  Computations computations_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<SessionId, Place> places_ TESSERA_GUARDED_BY(mutex_);
  // By session, oldest first.
  absl::flat_hash_map<SessionId, std::list<Kept>> kept_ TESSERA_GUARDED_BY(mutex_);
  std::list<Waiting> waiting_ TESSERA_GUARDED_BY(mutex_);                        // oldest first
  std::list<std::shared_ptr<Agreement>> agreements_ TESSERA_GUARDED_BY(mutex_);  // oldest first
  std::uint64_t next_ticket_ TESSERA_GUARDED_BY(mutex_) = 1;
  Figures counted_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::cache
