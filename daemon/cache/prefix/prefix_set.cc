#include "daemon/cache/prefix/prefix_set.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::cache {

absl::Status PrefixSet::Add(std::shared_ptr<Prefix> prefix, PrefixIndex::Ids ids,
                            const PrefixLife& life, Clock::TimePoint now, DroppedPrefixes& gone) {
  if (entries_.size() >= options_.max_prefixes && !DropLeastRecentlyUsed(gone)) {
    const auto pinned = std::count_if(entries_.begin(), entries_.end(),
                                      [](const Entry& entry) { return entry.life.pinned; });
    return WithCause(absl::ResourceExhaustedError(
                         Concat("tenant ", options_.tenant, " has ", entries_.size(),
                                " prefixes; the limit is ", options_.max_prefixes, ". ", pinned,
                                " are pinned and the others are in use; free some "
                                "and retry, or raise max_prefixes_per_tenant")),
                     ErrorCause::kQuota);
  }
  const PrefixId id = prefix->id();
  std::vector<BlockEvent> events;
  absl::Status status = index_.Insert(prefix->options().chain, ids, id, &events);
  if (!status.ok()) return status;
  Tell(prefix->options().chain, events);
  tile_bytes_ += prefix->options().tile_bytes;
  entries_.push_back({.prefix = std::move(prefix), .life = life, .used = now});
  by_id_[id] = std::prev(entries_.end());
  List(entries_.back());
  return absl::OkStatus();
}

void PrefixSet::Tell(const PrefixChain& chain, const std::vector<BlockEvent>& events) const {
  if (options_.on_blocks && !chain.model.empty() && !events.empty()) {
    options_.on_blocks(chain, events);
  }
}

void PrefixSet::List(const Entry& entry) {
  if (const auto expiry = entry.expiry()) expiries_.emplace(*expiry, entry.prefix->id());
}

void PrefixSet::Unlist(const Entry& entry) {
  if (const auto expiry = entry.expiry()) expiries_.erase({*expiry, entry.prefix->id()});
}

PrefixSet::Entry* PrefixSet::Find(PrefixId id) {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? nullptr : &*it->second;
}

void PrefixSet::Touch(Entry& entry, Clock::TimePoint now) {
  Unlist(entry);
  entry.used = now;
  List(entry);
  entries_.splice(entries_.end(), entries_, by_id_[entry.prefix->id()]);
}

void PrefixSet::Extend(Entry& entry, const PrefixLife& life) {
  Unlist(entry);
  entry.life.pinned |= life.pinned;
  const bool for_good = entry.life.ttl == Clock::Duration::zero() ||  //
                        life.ttl == Clock::Duration::zero();
  entry.life.ttl = for_good ? Clock::Duration::zero() : std::max(entry.life.ttl, life.ttl);
  List(entry);
}

void PrefixSet::Drop(PrefixId id, DropReason why, DroppedPrefixes& gone) {
  const auto it = by_id_.find(id);
  TESSERA_CHECK(it != by_id_.end(), "only a published prefix can be dropped");
  Unlist(*it->second);
  std::vector<BlockEvent> events;
  index_.Erase(id, &events);
  Tell(it->second->prefix->options().chain, events);
  tile_bytes_ -= it->second->prefix->options().tile_bytes;
  gone.push_back(std::move(it->second->prefix));
  entries_.erase(it->second);
  by_id_.erase(it);
  ++dropped_[static_cast<std::size_t>(why)];
}

bool PrefixSet::DropLeastRecentlyUsed(DroppedPrefixes& gone) {
  const auto it = std::find_if(entries_.begin(), entries_.end(),
                               [](const Entry& entry) { return entry.droppable(); });
  if (it == entries_.end()) return false;
  Drop(it->prefix->id(), DropReason::kLeastRecentlyUsed, gone);
  return true;
}

bool PrefixSet::DropLeastRecentlyStored(PrefixId older_than, DroppedPrefixes& gone) {
  for (const Entry& entry : entries_) {
    if (older_than.valid() && entry.prefix->id() == older_than) return false;
    if (!entry.droppable() || !entry.prefix->sequence().offloaded()) continue;
    Drop(entry.prefix->id(), DropReason::kLeastRecentlyUsed, gone);
    return true;
  }
  return false;
}

std::optional<Clock::TimePoint> PrefixSet::Expire(Clock::TimePoint now, DroppedPrefixes& gone) {
  for (auto it = expiries_.begin(); it != expiries_.end();) {
    const auto [expiry, id] = *it++;
    // A prefix in use is reconsidered when its last user is gone.
    if (Find(id)->in_use()) continue;
    if (expiry > now) return expiry;
    Drop(id, DropReason::kExpired, gone);
  }
  return std::nullopt;
}

void PrefixSet::Clear(DroppedPrefixes& gone) {
  while (!entries_.empty()) Drop(entries_.front().prefix->id(), DropReason::kFreed, gone);
}

}  // namespace tessera::cache
