#include "daemon/cache/tenant/tenant.h"

#include <thread>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/random.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

namespace {

constexpr std::uint64_t kPoolSlabBytes = 1024 * 1024;
constexpr std::uint32_t kOwnReaderSlots = 256;
// Address space of a directory: enough for the blocks and snapshots of far more lanes than a node
// can hold.
constexpr std::uint32_t kDirectoryExtents = 4096;
static_assert(kDirectoryExtents <= shm::kMaxDirectoryExtents);

// Bounds the node memory a tenant may hold: the hard limit in whole extents, plus slack for partly
// filled extents (one of the pool, a few of the directory, where each size class has its own
// slabs). Without this bound, fragmentation, which is charged to no object, could eat into other
// tenants' memory.
std::uint64_t HeldLimit(const Tenant::Options& options, std::uint64_t hard_limit_bytes) {
  if (hard_limit_bytes == 0) return 0;
  return device::RoundUp(hard_limit_bytes, options.pool_extent_bytes) + options.pool_extent_bytes +
         4 * options.directory_extent_bytes;
}

std::uint64_t RawCopyLimit(std::uint64_t host_rows_bytes) { return host_rows_bytes / 4 * 3; }

}  // namespace

absl::StatusOr<std::unique_ptr<Tenant>> Tenant::Create(const Options& options) {
  std::unique_ptr<Tenant> tenant(new Tenant(options));
  absl::StatusOr<std::unique_ptr<Directory>> directory =
      Directory::Create({.extent_bytes = options.directory_extent_bytes,
                         .limit_bytes = options.directory_extent_bytes * kDirectoryExtents,
                         .instance = options.instance,
                         .pool_extent_bytes = options.pool_extent_bytes,
                         .pool_limit_bytes = options.pool_limit_bytes,
                         .node = &tenant->held_,
                         .tenant = &tenant->account_,
                         .source = options.directory_memory,
                         .on_extent_gone = options.on_attention});
  if (!directory.ok()) return directory.status();
  tenant->directory_ = *std::move(directory);
  absl::StatusOr<std::unique_ptr<pool::Pool>> pool =
      pool::Pool::Create({.arena = {.extent_bytes = options.pool_extent_bytes,
                                    .limit_bytes = options.pool_limit_bytes,
                                    .node = &tenant->held_,
                                    .tag = pool::MemoryTag::kPoolExtents,
                                    .source = &options.device->pool_memory()},
                          .slab_bytes = kPoolSlabBytes,
                          .tenant = &tenant->account_,
                          .observer = tenant->directory_->pool_observer(),
                          .waits_for_importers = options.device->description().waits_for_importers,
                          .clears = !options.device->description().waits_for_importers});
  if (!pool.ok()) return pool.status();
  tenant->pool_ = *std::move(pool);
  tenant->epochs_ =
      std::make_unique<pool::Epochs>(pool::Epochs::Options{.epoch = tenant->directory_->epoch(),
                                                           .clock = options.clock,
                                                           .pin_limit = options.pin_limit,
                                                           .on_waiting = options.on_attention});
  tenant->epochs_->AddSource(tenant->own_pins_);
  tenant->prefixes_ = std::make_unique<PrefixStore>(
      PrefixStore::Options{.tenant = options.name,
                           .hash = NewPrefixHash(options.prefix_hash_seed),
                           .account = &tenant->heap_,
                           .clock = options.clock,
                           .max_prefixes = options.max_prefixes,
                           .next_id = [id = tenant.get()] { return id->NextId(); },
                           .on_attention = options.on_attention,
                           .waits = &tenant->counters_.match_waits,
                           .blocks = options.blocks});
  tenant->memory_ = {.directory = tenant->directory_.get(),
                     .pool = tenant->pool_.get(),
                     .epochs = tenant->epochs_.get(),
                     .device = options.device,
                     .counters = &tenant->counters_,
                     .raw_copies = &tenant->raw_copies_,
                     .observations = &tenant->host_rows_,
                     .offloaded = &tenant->offloaded_,
                     .host_tier = options.host_tier,
                     .clock = options.clock,
                     .heap = &tenant->heap_,
                     .books = &tenant->books_,
                     .loaded_books = options.loaded_books};
  return tenant;
}

Tenant::Tenant(const Options& options)
    : options_(options),
      account_(Concat("tenant ", options.name), options.hard_limit_bytes, options.objects),
      part_(options.guarantees == nullptr
                ? pool::Account(Concat("tenant ", options.name, ", part of the node"),
                                std::uint64_t{0}, options.node)
                : pool::Account(Concat("tenant ", options.name, ", part of the node"),
                                options.guarantees, options.id.value() - 1)),
      held_(Concat("tenant ", options.name, ", extents and all"),
            HeldLimit(options, options.hard_limit_bytes), &part_),
      heap_(Concat("tenant ", options.name, ", heap"), &account_, &part_),
      host_rows_(Concat("tenant ", options.name, ", rows in host memory"), options.host_rows_bytes,
                 options.host_rows),
      raw_copies_(Concat("tenant ", options.name, ", raw copies"),
                  RawCopyLimit(options.host_rows_bytes), &host_rows_),
      offloaded_(Concat("tenant ", options.name, ", offloaded"), options.host_tier_bytes),
      own_slots_(new shm::ReaderSlot[kOwnReaderSlots]()) {
  own_pins_ = std::make_shared<pool::PinSource>(
      pool::PinSource{own_slots_.get(), kOwnReaderSlots, /*revocable=*/false});
}

Tenant::~Tenant() {
  for (const std::shared_ptr<SessionState>& session : Sessions()) EndSession(session->id());
  MutexLock lock(mutex_);
  for (auto& [id, sequence] : sequences_) sequence->Free();
  sequences_.clear();
}

std::uint64_t Tenant::reserved_bytes() const {
  return options_.guarantees == nullptr
             ? 0
             : options_.guarantees->reserved_bytes(options_.id.value() - 1);
}

void Tenant::SetLimits(const Limits& limits) {
  soft_limit_.store(limits.soft_bytes, std::memory_order_relaxed);
  account_.SetLimit(limits.hard_bytes);
  held_.SetLimit(HeldLimit(options_, limits.hard_bytes));
  host_rows_.SetLimit(limits.host_rows_bytes);
  raw_copies_.SetLimit(RawCopyLimit(limits.host_rows_bytes));
  offloaded_.SetLimit(limits.host_tier_bytes);
}

std::uint64_t Tenant::NextId() {
  // The id contains the tenant, so ids are unique on the node and a lookup touches one tenant only.
  return (options_.id.value() << 48) | next_id_.fetch_add(1, std::memory_order_relaxed);
}

// ---- sequences

absl::Status Tenant::AdmitSequence(const std::shared_ptr<Sequence>& sequence,
                                   SessionState& session) {
  MutexLock lock(mutex_);
  if (sequences_.size() >= options_.max_sequences) {
    return WithCause(
        absl::ResourceExhaustedError(Concat(
            "tenant ", name(), " has ", sequences_.size(), " sequences; the limit is ",
            options_.max_sequences, "; free some and retry, or raise max_sequences_per_tenant")),
        ErrorCause::kQuota);
  }
  // Otherwise, a sequence created while its session ends would never be freed.
  if (!sessions_.contains(session.id())) {
    return absl::UnauthenticatedError(Concat(session.id().ToString(), " has ended"));
  }
  session.Own(sequence->id());
  sequences_[sequence->id()] = sequence;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Sequence>> Tenant::CreateSequence(SessionState& session,
                                                                 ModelId model_id) {
  absl::StatusOr<std::shared_ptr<const Model>> model = FindModel(model_id);
  if (!model.ok()) return model.status();
  absl::StatusOr<std::shared_ptr<Sequence>> sequence =
      Sequence::Create(memory_, SequenceId(NextId()), *model, session.id());
  if (!sequence.ok()) return sequence.status();
  if (absl::Status status = AdmitSequence(*sequence, session); !status.ok()) return status;
  return sequence;
}

absl::StatusOr<std::shared_ptr<Sequence>> Tenant::Fork(SessionState& session, SequenceId parent) {
  absl::StatusOr<std::shared_ptr<Sequence>> from = FindSequence(parent);
  if (!from.ok()) return from.status();
  absl::StatusOr<std::shared_ptr<Sequence>> child =
      (*from)->Fork(SequenceId(NextId()), session.id());
  if (!child.ok()) return child.status();
  if (absl::Status status = AdmitSequence(*child, session); !status.ok()) return status;
  return child;
}

absl::StatusOr<std::shared_ptr<Sequence>> Tenant::ForkPrefix(SessionState& session,
                                                             const PrefixStore::ForFork& from) {
  absl::StatusOr<std::shared_ptr<Sequence>> child =
      from.prefix->sequence().Fork(SequenceId(NextId()), session.id());
  if (!child.ok()) return child.status();
  (*child)->set_prefix(from.hold);
  if (absl::Status status = AdmitSequence(*child, session); !status.ok()) return status;
  return child;
}

absl::StatusOr<std::shared_ptr<Sequence>> Tenant::ForkForPrefix(Sequence& from) {
  absl::StatusOr<std::shared_ptr<Sequence>> frozen = from.Fork(SequenceId(NextId()), SessionId());
  // The frozen fork is not a user of the prefix it came from, so that prefix may be dropped first.
  if (frozen.ok()) (*frozen)->set_prefix(ForkHold());
  return frozen;
}

absl::StatusOr<std::shared_ptr<Sequence>> Tenant::FindSequence(SequenceId id) const {
  MutexLock lock(mutex_);
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return absl::NotFoundError(Concat("no ", id.ToString()));
  return it->second;
}

absl::StatusOr<std::shared_ptr<Sequence>> Tenant::FindOwned(const SessionState& session,
                                                            SequenceId id) const {
  absl::StatusOr<std::shared_ptr<Sequence>> sequence = FindSequence(id);
  if (!sequence.ok()) return sequence;
  if ((*sequence)->owner() != session.id()) {
    return absl::FailedPreconditionError(
        Concat(id.ToString(), " is owned by ", (*sequence)->owner().ToString(), ", not by ",
               session.id().ToString(), "; hand it over or fork it"));
  }
  return sequence;
}

absl::Status Tenant::Handover(SequenceId id, SessionState& from, SessionId to) {
  absl::StatusOr<std::shared_ptr<Sequence>> sequence = FindOwned(from, id);
  if (!sequence.ok()) return sequence.status();
  if (absl::Status status = (*sequence)->CloseTail(); !status.ok()) return status;
  MutexLock lock(mutex_);
  const auto receiver = sessions_.find(to);
  if (receiver == sessions_.end()) {
    return absl::NotFoundError(
        Concat("no ", to.ToString(), " to hand ", id.ToString(), " over to"));
  }
  if (!sequences_.contains(id)) return absl::NotFoundError(Concat("no ", id.ToString()));
  from.Disown(id);
  (*sequence)->set_owner(to);
  receiver->second->Own(id);
  return absl::OkStatus();
}

absl::Status Tenant::FreeSequence(SequenceId id) { return FreeIfOwned(id, SessionId()); }

// Frees the sequence; if `owner` is valid, only if it still owns it (it may just have handed it
// over).
absl::Status Tenant::FreeIfOwned(SequenceId id, SessionId owner, Freed* freed) {
  std::shared_ptr<Sequence> sequence;
  {
    MutexLock lock(mutex_);
    const auto it = sequences_.find(id);
    if (it == sequences_.end() || (owner.valid() && it->second->owner() != owner)) {
      return absl::NotFoundError(Concat("no ", id.ToString()));
    }
    sequence = std::move(it->second);
    sequences_.erase(it);
    if (const auto session = sessions_.find(sequence->owner()); session != sessions_.end()) {
      session->second->Disown(id);
    }
  }
  if (freed != nullptr) {
    const Sequence::Description held = sequence->Describe(/*lanes=*/false);
    ++freed->sequences;
    freed->bytes += held.tile_bytes - held.shared_tile_bytes + held.stored_bytes;
  }
  sequence->Free();
  return absl::OkStatus();
}

std::vector<std::shared_ptr<Sequence>> Tenant::Sequences() const {
  std::vector<std::shared_ptr<Sequence>> sequences;
  MutexLock lock(mutex_);
  for (const auto& [id, sequence] : sequences_) sequences.push_back(sequence);
  return sequences;
}

std::size_t Tenant::sequence_count() const {
  MutexLock lock(mutex_);
  return sequences_.size();
}

Tenant::SequenceCounts Tenant::CountSequences() const {
  SequenceCounts counts;
  for (const std::shared_ptr<Sequence>& sequence : Sequences()) {
    // An offloaded sequence has no tail.
    const bool decoding = sequence->decoding();
    ++(decoding ? counts.decoding : sequence->offloaded() ? counts.offloaded : counts.held);
    counts.tokens += sequence->CountTokens();
  }
  return counts;
}

void Tenant::CountWork() {
  for (const std::shared_ptr<SessionState>& session : Sessions()) {
    session->CountSteps(counters_);
    for (const std::shared_ptr<Sequence>& sequence : session->Decoding()) {
      sequence->CountCommitted();
    }
  }
}

// ---- tails

// Returns all sequences, or the error of the first one that is not owned.
absl::StatusOr<std::vector<std::shared_ptr<Sequence>>> Tenant::FindAllOwned(
    const SessionState& session, const std::vector<SequenceId>& ids) const {
  std::vector<std::shared_ptr<Sequence>> sequences;
  for (SequenceId id : ids) {
    absl::StatusOr<std::shared_ptr<Sequence>> sequence = FindOwned(session, id);
    if (!sequence.ok()) return sequence.status();
    sequences.push_back(*std::move(sequence));
  }
  return sequences;
}

absl::StatusOr<std::vector<Tenant::TailPlace>> Tenant::OpenTails(
    SessionState& session, const std::vector<SequenceId>& ids) {
  absl::StatusOr<std::vector<std::shared_ptr<Sequence>>> sequences = FindAllOwned(session, ids);
  if (!sequences.ok()) return sequences.status();
  std::vector<TailPlace> places;
  std::vector<std::shared_ptr<Sequence>> woken;  // those that were not decoding before
  for (const std::shared_ptr<Sequence>& sequence : *sequences) {
    const bool decoded = sequence->decoding();
    absl::StatusOr<Sequence::OpenedTail> tail =
        sequence->OpenTail(session.tails(), *session.control());
    if (!tail.ok()) {
      for (const std::shared_ptr<Sequence>& opened : woken) (void)opened->CloseTail();
      return tail.status();
    }
    session.AddDecoding(sequence);
    if (!decoded) woken.push_back(sequence);
    places.push_back({sequence->id(), *tail});
  }
  return places;
}

absl::StatusOr<std::vector<std::uint64_t>> Tenant::CloseTails(SessionState& session,
                                                              const std::vector<SequenceId>& ids) {
  absl::StatusOr<std::vector<std::shared_ptr<Sequence>>> sequences = FindAllOwned(session, ids);
  if (!sequences.ok()) return sequences.status();
  std::vector<std::uint64_t> tokens;
  for (const std::shared_ptr<Sequence>& sequence : *sequences) {
    if (absl::Status status = sequence->CloseTail(); !status.ok()) return status;
    tokens.push_back(sequence->Describe(/*lanes=*/false).tokens);
  }
  return tokens;
}

// ---- the daemon's own readers

Tenant::Reader::Reader(Tenant& tenant) : slot_(nullptr), word_(0) {
  const shm::Word& epoch = tenant.epochs_->epoch();
  for (std::uint32_t i =
           static_cast<std::uint32_t>(std::hash<std::thread::id>{}(std::this_thread::get_id()));
       ; ++i) {
    shm::Word& slot = tenant.own_slots_[i % kOwnReaderSlots].word;
    std::uint64_t expected = shm::kPinFree;
    // Claim the slot with a provisional pin on the current epoch, then pin properly.
    if (slot.compare_exchange_strong(expected, shm::PinWord(epoch.load()))) {
      slot_ = &slot;
      word_ = shm::Pin(slot, epoch);
      return;
    }
  }
}

Tenant::Reader::~Reader() {
  TESSERA_CHECK(shm::Unpin(*slot_, word_), "the daemon's own readers are never revoked");
}

}  // namespace tessera::cache
