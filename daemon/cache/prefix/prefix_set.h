// `PrefixSet` holds a tenant's published prefixes, indexed by token ids, by id and by last use.
//
// Not thread-safe; guarded by PrefixStore's lock. Dropped prefixes are moved to a list of the
// caller, who destroys it after releasing the lock.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/cache/prefix/prefix.h"
#include "daemon/cache/prefix/prefix_index.h"

namespace tessera::cache {

using DroppedPrefixes = std::vector<std::shared_ptr<Prefix>>;

enum class DropReason : std::uint8_t {
  kExpired,            // its time to live has passed
  kLeastRecentlyUsed,  // evicted for its slot or its memory
  kFreed,              // freed by name
};
inline constexpr std::size_t kDropReasons = 3;

class PrefixSet {
 public:
  struct Options {
    PrefixHash hash;
    pool::Account* account;
    std::uint32_t max_prefixes;
    std::string tenant;  // for error messages
    // Called by Add and Drop with the blocks of a chain with a model. Null: nobody is told.
    std::function<void(const PrefixChain&, const std::vector<BlockEvent>&)> on_blocks;
  };
  explicit PrefixSet(const Options& options)
      : options_(options), index_({.hash = options.hash, .account = options.account}) {}

  struct Entry {
    std::shared_ptr<Prefix> prefix;
    PrefixLife life;
    Clock::TimePoint used;
    std::uint32_t kept = 0;  // times it was found but not yet forked

    bool in_use() const { return kept > 0 || prefix->options().forks->count() > 0; }
    bool droppable() const { return !life.pinned && !in_use(); }
    // nullopt: it never expires.
    std::optional<Clock::TimePoint> expiry() const {
      if (life.pinned || life.ttl == Clock::Duration::zero()) return std::nullopt;
      return used + life.ttl;
    }
  };

  // No prefix with exactly these ids may exist. At the limit, evicts the least recently used one.
  // RESOURCE_EXHAUSTED: none may be evicted, or the index has no room.
  absl::Status Add(std::shared_ptr<Prefix> prefix, PrefixIndex::Ids ids, const PrefixLife& life,
                   Clock::TimePoint now, DroppedPrefixes& gone);
  // Null if it is not published.
  Entry* Find(PrefixId id);
  const Entry* Find(PrefixId id) const { return const_cast<PrefixSet*>(this)->Find(id); }
  // Marks the entry as used now.
  void Touch(Entry& entry, Clock::TimePoint now);
  // Extends the entry's life if `life` is longer.
  void Extend(Entry& entry, const PrefixLife& life);
  void Drop(PrefixId id, DropReason why, DroppedPrefixes& gone);
  // Drops the least recently used prefix that is droppable. Returns false if there is none.
  bool DropLeastRecentlyUsed(DroppedPrefixes& gone);
  // The same among those in the host tier. Valid `older_than`: only if used less recently than it.
  bool DropLeastRecentlyStored(PrefixId older_than, DroppedPrefixes& gone);
  // Drops expired prefixes, and returns the time of the next expiry. Visits only prefixes that are
  // due, the next one, and those in use before it.
  std::optional<Clock::TimePoint> Expire(Clock::TimePoint now, DroppedPrefixes& gone);
  void Clear(DroppedPrefixes& gone);

  const PrefixIndex& index() const { return index_; }
  // Least recently used first.
  const std::list<Entry>& entries() const { return entries_; }
  std::uint64_t tile_bytes() const { return tile_bytes_; }
  std::uint64_t dropped(DropReason why) const { return dropped_[static_cast<std::size_t>(why)]; }

 private:
  // Keep `expiries_` up to date; every change of an entry's life or last use happens between the
  // two.
  void Unlist(const Entry& entry);
  void List(const Entry& entry);

  void Tell(const PrefixChain& chain, const std::vector<BlockEvent>& events) const;

  const Options options_;
  PrefixIndex index_;
  std::list<Entry> entries_;
  // Expiry time of every entry that can expire.
  std::set<std::pair<Clock::TimePoint, PrefixId>> expiries_;
  absl::flat_hash_map<PrefixId, std::list<Entry>::iterator> by_id_;
  std::uint64_t tile_bytes_ = 0;
  std::array<std::uint64_t, kDropReasons> dropped_{};
};

}  // namespace tessera::cache
