#include "daemon/compaction/jobs/deferred_seals.h"

#include <algorithm>
#include <utility>

namespace tessera::compaction {

bool DeferredSeals::Join(Item item, Clock::TimePoint now) {
  MutexLock lock(mutex_);
  const auto [it, fresh] = lines_.try_emplace(item.tenant);
  Line& line = it->second;
  line.items.push_back(std::move(item));
  if (fresh) line.due = now + line.pause;
  return fresh;
}

void DeferredSeals::Return(Item item, Clock::TimePoint now) {
  MutexLock lock(mutex_);
  Line& line = lines_[item.tenant];
  line.items.push_back(std::move(item));
  line.pause = std::min(line.pause * 2, kLongestPause);
  line.due = now + line.pause;
  line.tried = false;
}

std::optional<DeferredSeals::Item> DeferredSeals::Next(TenantId tenant, bool found) {
  MutexLock lock(mutex_);
  const auto it = lines_.find(tenant);
  if (it == lines_.end()) return std::nullopt;
  Line& line = it->second;
  if (found) line.pause = kFirstPause;
  if (line.items.empty()) {
    lines_.erase(it);
    return std::nullopt;
  }
  Item next = std::move(line.items.front());
  line.items.pop_front();
  line.tried = true;
  return next;
}

bool DeferredSeals::Any(TenantId tenant) const {
  MutexLock lock(mutex_);
  return lines_.contains(tenant);
}

std::vector<DeferredSeals::Item> DeferredSeals::TakeDue(Clock::TimePoint now) {
  std::vector<Item> due;
  MutexLock lock(mutex_);
  for (auto& [tenant, line] : lines_) {
    if (line.tried || line.due > now) continue;
    due.push_back(std::move(line.items.front()));
    line.items.pop_front();
    line.tried = true;
  }
  return due;
}

std::optional<Clock::Duration> DeferredSeals::DueIn(Clock::TimePoint now) const {
  std::optional<Clock::Duration> next;
  MutexLock lock(mutex_);
  for (const auto& [tenant, line] : lines_) {
    if (line.tried) continue;
    const Clock::Duration left = std::max(line.due - now, Clock::Duration::zero());
    next = next.has_value() ? std::min(*next, left) : left;
  }
  return next;
}

}  // namespace tessera::compaction
