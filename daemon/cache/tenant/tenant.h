// `Tenant` is a security and quota domain with its own memory, models, sequences and sessions.
// Tenants share nothing, so no call of one tenant waits for a call of another.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/memory/directory.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/prefix/prefix_store.h"
#include "daemon/cache/segment/book_shelf.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/cache/tenant/session_state.h"
#include "daemon/pool/epochs.h"
#include "daemon/pool/guarantees.h"
#include "daemon/pool/pool.h"
#include "daemon/tiers/host/host_tier.h"

namespace tessera::cache {

class Tenant {
 public:
  struct Options {
    TenantId id;
    std::string name;
    std::uint64_t hard_limit_bytes = 0;  // 0: only the node's limit applies
    std::uint64_t pool_extent_bytes = 0;
    std::uint64_t pool_limit_bytes = 0;  // address space, in whole extents
    std::uint64_t directory_extent_bytes = 0;
    std::uint64_t instance = 0;
    std::uint32_t ring_tiles = 0;
    std::uint64_t staging_bytes = 0;
    std::uint64_t tail_extent_bytes = 0;
    std::uint32_t max_models = 0;
    std::uint32_t max_sequences = 0;
    std::uint32_t max_prefixes = 0;
    std::uint64_t prefix_hash_seed = 0;
    Clock::Duration pin_limit{};
    pool::Account* node = nullptr;
    // Charge `node` with what this tenant uses, and keep a part free for it; null: charged
    // directly.
    pool::Guarantees* guarantees = nullptr;
    pool::Account* host_rows = nullptr;  // node account
    std::uint64_t host_rows_bytes = 0;   // this tenant's share; 0: only the node's limit applies
    pool::Account* objects = nullptr;    // node account for the objects of all tenants; may be null
    tiers::HostTier* host_tier = nullptr;  // the node's
    std::uint64_t host_tier_bytes = 0;     // this tenant's share; 0: all of it
    device::Device* device = nullptr;
    const BookLibrary* loaded_books = nullptr;         // of the node; null: none
    device::MemorySource* directory_memory = nullptr;  // host memory, whatever the device
    const Clock* clock = nullptr;
    // Called when garbage starts to wait for readers, or an extent is released: the event loop
    // should look.
    std::function<void()> on_attention;
    BlockEventSink* blocks = nullptr;  // hears what workers find among prefixes; null: nobody does
  };
  static absl::StatusOr<std::unique_ptr<Tenant>> Create(const Options& options);
  ~Tenant();

  // The limits are those at start: SetLimits may have changed them since.
  const Options& options() const { return options_; }
  const std::string& name() const { return options_.name; }
  const pool::Account& account() const { return account_; }
  pool::Account& account() { return account_; }
  // Rows held in host memory: raw copies and observations.
  const pool::Account& host_rows() const { return host_rows_; }
  const TenantMemory& memory() const { return memory_; }
  // Memory of the node that the tenant uses: its extents, tails and staging arenas, and heap
  // memory.
  const pool::Account& part() const { return part_; }
  // What it may use of the node's memory whatever others do.
  std::uint64_t reserved_bytes() const;
  // Above it, idle memory is reclaimed first; 0: none.
  std::uint64_t soft_limit_bytes() const { return soft_limit_.load(std::memory_order_relaxed); }
  struct Limits {
    std::uint64_t soft_bytes = 0;
    std::uint64_t hard_bytes = 0;
    std::uint64_t host_rows_bytes = 0;
    std::uint64_t host_tier_bytes = 0;
  };
  // If the tenant uses more than a new limit, it keeps the memory until it is freed or reclaimed.
  // Thread-safe.
  void SetLimits(const Limits& limits);
  // Bytes this tenant has in the host tier.
  const pool::Account& offloaded() const { return offloaded_; }
  Directory& directory() { return *directory_; }
  pool::Pool& pool() { return *pool_; }
  pool::Epochs& epochs() { return *epochs_; }
  TenantCounters& counters() { return counters_; }
  PrefixStore& prefixes() { return *prefixes_; }

  // ---- sessions
  struct NewSession {
    std::string worker_name;
    std::string group;
    std::uint32_t rank = 0;
    std::uint32_t group_size = 1;
    std::string cache_salt;
    std::optional<Clock::Duration> pin_limit{};  // nullopt: the daemon's
  };
  absl::StatusOr<std::shared_ptr<SessionState>> OpenSession(const NewSession& hello);
  // What an ended session held: its sequences, and the bytes of tiles that no other sequence or
  // prefix shares, in the pool and in the host tier.
  struct Freed {
    std::uint64_t sequences = 0;
    std::uint64_t bytes = 0;
  };
  // Frees everything the session owns, then forgets the session. Idempotent.
  Freed EndSession(SessionId id);
  // Returns UNAUTHENTICATED if the session is unknown or the secret is wrong.
  absl::StatusOr<std::shared_ptr<SessionState>> FindSession(SessionId id,
                                                            std::uint64_t secret) const;
  std::vector<std::shared_ptr<SessionState>> Sessions() const;
  std::size_t session_count() const;

  // ---- models
  // A model lives, and is charged to the tenant, while a session that registered it, a sequence or
  // a prefix of it exists. UNAUTHENTICATED: the session has ended. An invalid session never ends.
  absl::StatusOr<std::shared_ptr<const Model>> RegisterModel(ModelSpec spec, SessionId session);
  absl::StatusOr<std::shared_ptr<const Model>> FindModel(ModelId id) const;

  // ---- sequences
  absl::StatusOr<std::shared_ptr<Sequence>> CreateSequence(SessionState& session, ModelId model);
  absl::StatusOr<std::shared_ptr<Sequence>> Fork(SessionState& session, SequenceId parent);
  // Forks a prefix obtained from PrefixStore::TakeForFork.
  absl::StatusOr<std::shared_ptr<Sequence>> ForkPrefix(SessionState& session,
                                                       const PrefixStore::ForFork& from);
  // Creates the frozen sequence of a prefix: a fork that no session owns and no lookup finds.
  absl::StatusOr<std::shared_ptr<Sequence>> ForkForPrefix(Sequence& from);
  absl::StatusOr<std::shared_ptr<Sequence>> FindSequence(SequenceId id) const;
  // Returns FAILED_PRECONDITION if another session owns it.
  absl::StatusOr<std::shared_ptr<Sequence>> FindOwned(const SessionState& session,
                                                      SequenceId id) const;
  absl::Status Handover(SequenceId id, SessionState& from, SessionId to);
  // Returns NOT_FOUND if there is no such sequence.
  absl::Status FreeSequence(SequenceId id);
  std::vector<std::shared_ptr<Sequence>> Sequences() const;
  std::size_t sequence_count() const;
  // Every sequence is in one of the three states. Waits for no append.
  struct SequenceCounts {
    std::uint32_t held = 0;  // in the pool, without a tail
    std::uint32_t decoding = 0;
    std::uint32_t offloaded = 0;
    std::uint64_t tokens = 0;  // of all three
  };
  SequenceCounts CountSequences() const;
  // Adds to counters() what workers have written to mapped memory since the last call.
  void CountWork();

  // Opens tails for all of the sequences or for none. `session` must own them. If memory for one is
  // missing, sequences that were already decoding continue in newly opened rings.
  struct TailPlace {
    SequenceId sequence;
    Sequence::OpenedTail tail;
  };
  absl::StatusOr<std::vector<TailPlace>> OpenTails(SessionState& session,
                                                   const std::vector<SequenceId>& ids);
  // Returns the number of tokens that each sequence then holds. Stops at the first one that cannot
  // be closed for lack of memory.
  absl::StatusOr<std::vector<std::uint64_t>> CloseTails(SessionState& session,
                                                        const std::vector<SequenceId>& ids);

  // A reader slot for the daemon's own reads. It blocks no other reader and is never revoked.
  class Reader {
   public:
    explicit Reader(Tenant& tenant);
    ~Reader();
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;

   private:
    shm::Word* slot_;
    std::uint64_t word_;
  };

 private:
  struct Registered {
    std::weak_ptr<const Model> model;
    std::shared_ptr<const Model> held;     // null without users: sequences keep it alive then
    absl::flat_hash_set<SessionId> users;  // live sessions that registered it
  };
  explicit Tenant(const Options& options);
  std::uint64_t NextId();
  void ForgetUnusedModels() TESSERA_REQUIRES(mutex_) {
    absl::erase_if(models_, [this](const auto& entry) {
      const bool unused = entry.second.model.expired();
      if (unused) books_.Drop(entry.first);
      return unused;
    });
  }
  absl::Status AdmitSequence(const std::shared_ptr<Sequence>& sequence, SessionState& session);
  absl::Status FreeIfOwned(SequenceId id, SessionId owner, Freed* freed = nullptr);
  absl::StatusOr<std::vector<std::shared_ptr<Sequence>>> FindAllOwned(
      const SessionState& session, const std::vector<SequenceId>& ids) const;

  const Options options_;
  pool::Account account_;  // bytes of objects, bounded by the hard limit
  pool::Account part_;     // everything that is charged to the node
  pool::Account held_;     // physical memory, charged on to part_
  pool::Account heap_;     // heap memory, charged on to account_ and part_
  pool::Account host_rows_;
  pool::Account raw_copies_;  // part of host_rows_; smaller, so observations always find some room
  pool::Account offloaded_;
  std::atomic<std::uint64_t> soft_limit_{0};
  TenantCounters counters_;
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<pool::Pool> pool_;
  std::unique_ptr<pool::Epochs> epochs_;
  BookShelf books_;
  TenantMemory memory_{};
  std::shared_ptr<pool::PinSource> own_pins_;
  std::unique_ptr<shm::ReaderSlot[]> own_slots_;
  std::atomic<std::uint64_t> next_id_{1};

  mutable Mutex mutex_;
  absl::flat_hash_map<SessionId, std::shared_ptr<SessionState>> sessions_
      TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<ModelId, Registered> models_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<SequenceId, std::shared_ptr<Sequence>> sequences_ TESSERA_GUARDED_BY(mutex_);
  // Declared last so that it is destroyed first: prefixes return their memory to the members above.
  std::unique_ptr<PrefixStore> prefixes_;
};

}  // namespace tessera::cache
