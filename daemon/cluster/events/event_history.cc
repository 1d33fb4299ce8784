#include "daemon/cluster/events/event_history.h"

#include <algorithm>
#include <utility>

namespace tessera::cluster {

std::uint64_t EventHistory::Add(const std::string& topic, Payload payload) {
  MutexLock lock(mutex_);
  Topic& of = topics_[topic];
  bytes_ += payload->size();
  of.kept.push_back(std::move(payload));
  order_.push_back(topic);
  while (bytes_ > most_bytes_ && order_.size() > 1) {
    const auto oldest = topics_.find(order_.front());
    order_.pop_front();
    if (oldest == topics_.end() || oldest->second.kept.empty()) continue;
    bytes_ -= oldest->second.kept.front()->size();
    oldest->second.kept.pop_front();
  }
  return of.next++;
}

void EventHistory::Forget(const std::string& topic) {
  MutexLock lock(mutex_);
  const auto it = topics_.find(topic);
  if (it == topics_.end()) return;
  for (const Payload& payload : it->second.kept) bytes_ -= payload->size();
  topics_.erase(it);
  order_.remove(topic);
}

bool EventHistory::Has(const std::string& topic) const {
  MutexLock lock(mutex_);
  return topics_.contains(topic);
}

std::optional<std::string> EventHistory::OnlyTopic() const {
  MutexLock lock(mutex_);
  if (topics_.size() != 1) return std::nullopt;
  return topics_.begin()->first;
}

EventHistory::Replay EventHistory::From(const std::string& topic, std::uint64_t first) const {
  MutexLock lock(mutex_);
  const auto it = topics_.find(topic);
  if (it == topics_.end() || first >= it->second.next) return {.first = first, .payloads = {}};
  const std::uint64_t oldest = it->second.next - it->second.kept.size();
  first = std::max(first, oldest);
  const auto begin = it->second.kept.begin() + static_cast<std::ptrdiff_t>(first - oldest);
  return {.first = first, .payloads = {begin, it->second.kept.end()}};
}

}  // namespace tessera::cluster
