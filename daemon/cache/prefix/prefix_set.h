// The published prefixes of a tenant: by their token ids, by name, and by when they were last used.
//
// Not thread-safe; PrefixStore has the lock. What goes is moved to a list of the caller's, whose
// end, outside that lock, frees it.
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

using GonePrefixes = std::vector<std::shared_ptr<Prefix>>;

enum class DropReason : std::uint8_t {
  kExpired,            // its time to live has passed
  kLeastRecentlyUsed,  // another needed its place or its memory
  kFreed,              // by name
};
inline constexpr std::size_t kDropReasons = 3;

class PrefixSet {
 public:
  struct Options {
    PrefixHash hash;
    pool::Account* account;
    std::uint32_t max_prefixes;
    std::string tenant;  // for messages
  };
  explicit PrefixSet(const Options& options)
      : options_(options), index_({.hash = options.hash, .account = options.account}) {}

  struct Entry {
    std::shared_ptr<Prefix> prefix;
    PrefixLife life;
    Clock::TimePoint used;
    std::uint32_t kept = 0;  // by those who have found it and not forked it yet

    bool in_use() const { return kept > 0 || prefix->options().forks->count() > 0; }
    bool droppable() const { return !life.pinned && !in_use(); }
    // Nothing: not by time.
    std::optional<Clock::TimePoint> expiry() const {
      if (life.pinned || life.ttl == Clock::Duration::zero()) return std::nullopt;
      return used + life.ttl;
    }
  };

  // No prefix has exactly these ids. At the limit, the least recently used one makes room.
  // RESOURCE_EXHAUSTED where none may go, or the index has no room.
  absl::Status Add(std::shared_ptr<Prefix> prefix, PrefixIndex::Ids ids, const PrefixLife& life,
                   Clock::TimePoint now, GonePrefixes& gone);
  // Null where it is not published.
  Entry* Find(PrefixId id);
  const Entry* Find(PrefixId id) const { return const_cast<PrefixSet*>(this)->Find(id); }
  // It was used now.
  void Touch(Entry& entry, Clock::TimePoint now);
  // The longer life wins.
  void Extend(Entry& entry, const PrefixLife& life);
  void Drop(PrefixId id, DropReason why, GonePrefixes& gone);
  // The one that was not used for longest, of those that may go. False where there is none.
  bool DropLeastRecentlyUsed(GonePrefixes& gone);
  // Drops what has had its time, and returns when the next has. Looks at those, at the next, and at
  // what is in use before it: not at prefixes that nothing ends.
  std::optional<Clock::TimePoint> Expire(Clock::TimePoint now, GonePrefixes& gone);
  void Clear(GonePrefixes& gone);

  const PrefixIndex& index() const { return index_; }
  // The least recently used first.
  const std::list<Entry>& entries() const { return entries_; }
  std::uint64_t tile_bytes() const { return tile_bytes_; }
  std::uint64_t dropped(DropReason why) const { return dropped_[static_cast<std::size_t>(why)]; }

 private:
  // When one expires unless it is used. Around every change of an entry's life or use.
  void Unlist(const Entry& entry);
  void List(const Entry& entry);

  const Options options_;
  PrefixIndex index_;
  std::list<Entry> entries_;
  // Of every entry that time may end.
  std::set<std::pair<Clock::TimePoint, PrefixId>> expiries_;
  absl::flat_hash_map<PrefixId, std::list<Entry>::iterator> by_id_;
  std::uint64_t tile_bytes_ = 0;
  std::array<std::uint64_t, kDropReasons> dropped_{};
};

}  // namespace tessera::cache
