// A security and quota domain: its memory, its models, its sequences and its sessions. Nothing here
// is shared with another tenant; no call of one waits for a call of another.
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
#include "daemon/cache/sequence/sequence.h"
#include "daemon/cache/tenant/session_state.h"
#include "daemon/pool/epochs.h"
#include "daemon/pool/pool.h"
#include "daemon/tiers/host/host_tier.h"

namespace tessera::cache {

class Tenant {
 public:
  struct Options {
    TenantId id;
    std::string name;
    std::string token;
    std::uint64_t hard_limit_bytes = 0;  // 0: the node's limit alone
    std::uint64_t pool_extent_bytes = 0;
    std::uint64_t pool_limit_bytes = 0;  // address space; whole extents
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
    pool::Account* host_rows = nullptr;  // of the node
    std::uint64_t host_rows_bytes = 0;   // this tenant's part; 0: the node's limit alone
    pool::Account* objects = nullptr;    // of the node: what all tenants' objects use; may be null
    tiers::HostTier* host_tier = nullptr;  // of the node
    std::uint64_t host_tier_bytes = 0;     // of it, at most for this tenant; 0: all
    std::uint64_t soft_limit_bytes = 0;    // above it this tenant's idle memory goes first; 0: none
    device::Device* device = nullptr;
    device::MemorySource* directory_memory = nullptr;  // host memory, whatever the device
    const Clock* clock = nullptr;
    // Something starts to wait for readers, or an extent went: the event loop should look.
    std::function<void()> on_attention;
  };
  static absl::StatusOr<std::unique_ptr<Tenant>> Create(const Options& options);
  ~Tenant();

  const Options& options() const { return options_; }
  const std::string& name() const { return options_.name; }
  const pool::Account& account() const { return account_; }
  pool::Account& account() { return account_; }
  // Rows in host memory that wait: raw copies, and what workers showed.
  const pool::Account& host_rows() const { return host_rows_; }
  const TenantMemory& memory() const { return memory_; }
  // What it has in the host tier.
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
  };
  absl::StatusOr<std::shared_ptr<SessionState>> OpenSession(const NewSession& hello);
  // Frees what the session owns and forgets it. Idempotent.
  void EndSession(SessionId id);
  // UNAUTHENTICATED where the session is unknown or the secret wrong.
  absl::StatusOr<std::shared_ptr<SessionState>> FindSession(SessionId id,
                                                            std::uint64_t secret) const;
  std::vector<std::shared_ptr<SessionState>> Sessions() const;
  std::size_t session_count() const;

  // ---- models
  // Kept while the session lives, or a sequence is of it, or nobody needs its place.
  absl::StatusOr<std::shared_ptr<const Model>> RegisterModel(ModelSpec spec, SessionId session);
  absl::StatusOr<std::shared_ptr<const Model>> FindModel(ModelId id) const;

  // ---- sequences
  absl::StatusOr<std::shared_ptr<Sequence>> CreateSequence(SessionState& session, ModelId model);
  absl::StatusOr<std::shared_ptr<Sequence>> Fork(SessionState& session, SequenceId parent);
  // Of a prefix that was taken for that (PrefixStore::TakeForFork).
  absl::StatusOr<std::shared_ptr<Sequence>> ForkPrefix(SessionState& session,
                                                       const PrefixStore::ForFork& from);
  // What a prefix is made of: a fork that nobody finds and no session owns.
  absl::StatusOr<std::shared_ptr<Sequence>> ForkForPrefix(Sequence& from);
  absl::StatusOr<std::shared_ptr<Sequence>> FindSequence(SequenceId id) const;
  // FAILED_PRECONDITION where it is another session's.
  absl::StatusOr<std::shared_ptr<Sequence>> FindOwned(const SessionState& session,
                                                      SequenceId id) const;
  absl::Status Handover(SequenceId id, SessionState& from, SessionId to);
  // NOT_FOUND where there is none.
  absl::Status FreeSequence(SequenceId id);
  std::vector<std::shared_ptr<Sequence>> Sequences() const;
  std::size_t sequence_count() const;

  // All or none of them get tail rings of `session`, which must own them. Where the memory for one
  // is missing, those that decoded before go on in the rings that they have then.
  struct TailPlace {
    SequenceId sequence;
    Sequence::OpenedTail tail;
  };
  absl::StatusOr<std::vector<TailPlace>> OpenTails(SessionState& session,
                                                   const std::vector<SequenceId>& ids);
  // Returns the tokens each sequence holds then. Stops at the first that cannot be closed, for lack
  // of memory.
  absl::StatusOr<std::vector<std::uint64_t>> CloseTails(SessionState& session,
                                                        const std::vector<SequenceId>& ids);

  // A slot for the daemon's own reads; blocks nobody, never revoked.
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
    std::shared_ptr<const Model> model;
    absl::flat_hash_set<SessionId> users;  // sessions that live and have registered it
    bool InUse() const { return !users.empty() || model.use_count() > 1; }
  };
  explicit Tenant(const Options& options);
  std::uint64_t NextId();
  absl::Status AdmitSequence(const std::shared_ptr<Sequence>& sequence, SessionState& session);
  absl::Status FreeIfOwned(SequenceId id, SessionId owner);
  absl::StatusOr<std::vector<std::shared_ptr<Sequence>>> FindAllOwned(
      const SessionState& session, const std::vector<SequenceId>& ids) const;

  const Options options_;
  pool::Account account_;  // objects, by the hard limit
  pool::Account held_;     // physical memory, passed on to the node
  pool::Account host_rows_;
  pool::Account raw_copies_;  // of those: what is shown always finds some room
  pool::Account offloaded_;
  TenantCounters counters_;
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<pool::Pool> pool_;
  std::unique_ptr<pool::Epochs> epochs_;
  TenantMemory memory_{};
  std::shared_ptr<pool::PinSource> own_pins_;
  std::unique_ptr<shm::ReaderSlot[]> own_slots_;
  std::atomic<std::uint64_t> next_id_{1};

  mutable Mutex mutex_;
  absl::flat_hash_map<SessionId, std::shared_ptr<SessionState>> sessions_
      TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<ModelId, Registered> models_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<SequenceId, std::shared_ptr<Sequence>> sequences_ TESSERA_GUARDED_BY(mutex_);
  // Last, so that it goes first: its prefixes give their memory back.
  std::unique_ptr<PrefixStore> prefixes_;
};

}  // namespace tessera::cache
