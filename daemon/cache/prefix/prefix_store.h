// A tenant's published prefixes, and the calls that ask for them: who has found which and not
// forked it yet, who computes a head and who waits for that, what the ranks of a tensor-parallel
// group have been told.
//
//   Match ──▶ found, or nobody computes more ──────────────▶ answered
//         `─▶ somebody else computes more, and it may wait ─▶ a question, answered when that is
//             published, when nobody computes it any more, or when its time is over
//
// A question holds no thread and no lock: whoever changes what it waits for answers it. Time passes
// when Sweep is called, by the injected clock.
//
// Thread-safe. `mutex_` stands alone: under it no other lock is taken but the account's, nothing is
// freed and nobody is told; both are done by the call that caused them once it has let go of it.
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

namespace tessera::cache {

// Under what a head is published, beside its token ids and the rank it is for.
struct PrefixScope {
  std::string text;
  bool every_boundary = false;  // the policy keeps every token
};
PrefixScope ScopeOf(const std::string& tenant, const Model& model, const std::string& policy,
                    bool keeps_every_token);

class PrefixStore {
 public:
  using Ids = PrefixIndex::Ids;

  // What a session has found is kept for it for so long, until it forks that.
  static constexpr Clock::Duration kKept = std::chrono::seconds(30);
  // Of one session; the oldest goes.
  static constexpr std::size_t kMostKept = 64;
  // For how long what a group has been told waits for the ranks that have not asked yet.
  static constexpr Clock::Duration kAgreed = std::chrono::seconds(30);
  static constexpr std::size_t kMostAgreed = 256;     // of one group; the oldest goes
  static constexpr std::size_t kMostQuestions = 256;  // that wait; others are answered at once
  static constexpr std::uint32_t kMostRanks = 1024;

  struct Options {
    std::string tenant;
    PrefixHash hash;
    pool::Account* account;
    const Clock* clock;
    std::uint32_t max_prefixes;
    std::function<std::uint64_t()> next_id;
    // Sweep should be called sooner than it was told.
    std::function<void()> on_attention;
  };
  explicit PrefixStore(const Options& options);
  ~PrefixStore();

  // ---- sessions: whoever asks has one

  struct Place {
    std::string group;
    std::uint32_t rank = 0;
    std::uint32_t group_size = 1;
  };
  void SessionOpened(SessionId id, Place place);
  // Forgets what it computes, waits for and has found. Prefixes stay.
  void SessionEnded(SessionId id);

  // ---- publishing

  // Where the session's heads are found. UNAUTHENTICATED where it has ended.
  absl::StatusOr<PrefixChain> ChainOf(SessionId session, const PrefixScope& scope) const;
  // A prefix that has this head, one that ends there if there is such a one; or null.
  std::shared_ptr<Prefix> Find(const PrefixChain& chain, Ids ids) const;

  struct Publication {
    SessionId session;
    PrefixChain chain;
    std::string policy;
    Ids ids;
    PrefixLife life;
    // Nobody else has it; freed where it is not needed. Null: only where the head is there already.
    std::shared_ptr<Sequence> frozen;
  };
  struct Published {
    std::shared_ptr<Prefix> prefix;  // null: it is not there
    bool existed = false;  // the head was published before; its life is the longer one then
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
    PrefixId prefix;  // invalid: nothing
    std::uint64_t tokens = 0;
    std::uint64_t computing = 0;  // more than `tokens`: that others compute now
    ComputationId computation;    // of this session, where it computes the rest
  };
  using Done = absl::AnyInvocable<void(absl::StatusOr<Answer>) &&>;
  // Calls `done` once: before it returns 0, or from a later call, on that one's thread. What it
  // returns else is for Cancel.
  std::uint64_t Match(Question question, Done done);
  // The question is answered CANCELLED, unless it has been answered.
  void Cancel(std::uint64_t question);
  // False where the session has said no such thing.
  bool Withdraw(ComputationId computation, SessionId session);

  // ---- forks

  struct ForFork {
    std::shared_ptr<Prefix> prefix;
    ForkHold hold;
  };
  // NOT_FOUND where it is neither published nor kept for the session, for which it stays kept until
  // the fork is there (Forked): one that is refused may be asked for again.
  absl::StatusOr<ForFork> TakeForFork(PrefixId id, SessionId session);
  void Forked(PrefixId id, SessionId session);

  // ---- going

  // Nobody finds it from now on. False where there is none.
  bool Free(PrefixId id);
  // The least recently used of those that nothing was forked from and nobody pins goes; the bytes
  // of tiles that nobody else holds. Nothing where there is none.
  std::optional<std::uint64_t> DropLeastRecentlyUsed();
  // Lets time pass. Returns how long until there is more to do.
  std::optional<Clock::Duration> Sweep();

  // ---- looking

  struct Description {
    std::shared_ptr<Prefix> prefix;
    PrefixLife life;
    Clock::Duration idle{};
  };
  // The least recently used first.
  std::vector<Description> List() const;
  struct Figures {
    std::uint64_t prefixes = 0;
    std::uint64_t tile_bytes = 0;
    std::uint64_t waiting = 0;       // questions
    std::uint64_t computations = 0;  // that sessions have said they do
    std::uint64_t index_nodes = 0;
    // Since start.
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
  // What the ranks of a group are told of one question. Each takes its turn with the first that it
  // has not asked; the next time it asks the same that is the next question.
  struct Agreement {
    std::string asker;
    std::string scope;
    std::shared_ptr<TokenList> tokens;
    std::vector<bool> asked;                    // by rank
    std::optional<std::uint64_t> found;         // nothing: somebody waits
    std::vector<std::shared_ptr<Prefix>> owed;  // by rank: kept for those that have not asked
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
    std::shared_ptr<Agreement> agreement;  // of a group
    Done done;
  };
  struct Kept {
    std::shared_ptr<Prefix> prefix;
    std::uint32_t times = 0;  // found, and not forked yet
    Clock::TimePoint until;
  };
  // What a call leaves to be done when it has let go of the lock: told first, then freed.
  struct Aftermath {
    explicit Aftermath(const PrefixStore& of) : store(of) {}
    ~Aftermath();
    const PrefixStore& store;
    bool attention = false;
    GonePrefixes gone;
    std::vector<std::pair<Done, absl::StatusOr<Answer>>> answers;
  };

  absl::StatusOr<Place> PlaceOf(SessionId id) const TESSERA_REQUIRES(mutex_);
  static std::string AskerOf(SessionId id, const Place& place);
  static std::vector<PrefixChain> ChainsOf(const PrefixScope& scope, const Place& place);
  // Charges a list once, before it is remembered.
  absl::Status Remember(TokenList& tokens);
  void DueAt(Clock::TimePoint when, Aftermath& after);
  void ForkEnded();

  // prefix_match.cc
  absl::Status JoinAgreement(Waiting& question, Clock::TimePoint now, Aftermath& after)
      TESSERA_REQUIRES(mutex_);
  // How much of a question all ranks have, or will have when what others compute is published.
  std::uint64_t Longest(const Waiting& question, bool computed_too) const TESSERA_REQUIRES(mutex_);
  // Nothing where it goes on waiting.
  std::optional<Answer> TryAnswer(Waiting& question, bool may_wait, Clock::TimePoint now,
                                  Aftermath& after) TESSERA_REQUIRES(mutex_);
  void Agree(Agreement& agreement, const Waiting& question, std::uint64_t found,
             Clock::TimePoint now, Aftermath& after) TESSERA_REQUIRES(mutex_);
  void Count(const Waiting& question, const Answer& answer) TESSERA_REQUIRES(mutex_);
  // Answers every question that has an answer by now.
  void Settle(Clock::TimePoint now, Aftermath& after) TESSERA_REQUIRES(mutex_);
  void Refuse(const std::function<bool(const Waiting&)>& whom, const absl::Status& why,
              Aftermath& after) TESSERA_REQUIRES(mutex_);
  void KeepFor(SessionId session, const std::shared_ptr<Prefix>& prefix, Clock::TimePoint now,
               Aftermath& after) TESSERA_REQUIRES(mutex_);
  static Kept* FindKept(std::list<Kept>& found, PrefixId id);
  void LetGo(const std::shared_ptr<Prefix>& prefix, Aftermath& after) TESSERA_REQUIRES(mutex_);
  void Forget(std::list<std::shared_ptr<Agreement>>::iterator agreement, Aftermath& after)
      TESSERA_REQUIRES(mutex_);

  const Options options_;
  // When Sweep has something to do, in nanoseconds of the clock. Lowered by anyone.
  std::atomic<std::int64_t> due_;
  std::atomic<bool> may_expire_{false};  // there has been a prefix with a time to live

  mutable Mutex mutex_;
  PrefixSet set_ TESSERA_GUARDED_BY(mutex_);
  Computations computations_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<SessionId, Place> places_ TESSERA_GUARDED_BY(mutex_);
  // By the session that has found it, the oldest first.
  absl::flat_hash_map<SessionId, std::list<Kept>> kept_ TESSERA_GUARDED_BY(mutex_);
  std::list<Waiting> waiting_ TESSERA_GUARDED_BY(mutex_);                        // the oldest first
  std::list<std::shared_ptr<Agreement>> agreements_ TESSERA_GUARDED_BY(mutex_);  // likewise
  std::uint64_t next_ticket_ TESSERA_GUARDED_BY(mutex_) = 1;
  Figures counted_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::cache
