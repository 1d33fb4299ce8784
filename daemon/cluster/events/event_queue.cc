#include "daemon/cluster/events/event_queue.h"

#include <utility>

namespace tessera::cluster {

bool EventQueue::IsOwner(const cache::BlockReader& reader) const {
  const auto it = owners_.find(reader.worker);
  return it != owners_.end() && it->second == reader.tenant;
}

void EventQueue::Changed(const cache::BlockReader& reader, const std::string& model,
                         const std::vector<cache::BlockEvent>& events) {
  MutexLock lock(mutex_);
  if (!IsOwner(reader)) return;
  const bool fits = blocks_ + events.size() <= most_blocks_ || retold_ == reader.worker;
  if (!fits) lost_.insert(reader.worker);
  if (lost_.contains(reader.worker)) {
    dropped_ += events.size();
    changed_.NotifyAll();
    return;
  }
  notes_.push_back({Note::Kind::kChanged, reader.worker, model, events});
  blocks_ += events.size();
  changed_.NotifyAll();
}

void EventQueue::Cleared(const cache::BlockReader& reader) {
  MutexLock lock(mutex_);
  owners_.try_emplace(reader.worker, reader.tenant);
  if (!IsOwner(reader)) return;
  lost_.erase(reader.worker);
  notes_.push_back({Note::Kind::kCleared, reader.worker, {}, {}});
  changed_.NotifyAll();
}

void EventQueue::Left(const cache::BlockReader& reader) {
  MutexLock lock(mutex_);
  if (!IsOwner(reader)) return;
  owners_.erase(reader.worker);
  lost_.erase(reader.worker);
  notes_.push_back({Note::Kind::kLeft, reader.worker, {}, {}});
  changed_.NotifyAll();
}

std::vector<EventQueue::Note> EventQueue::Take(Clock::Duration patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  MutexLock lock(mutex_);
  retold_.clear();
  while (notes_.empty() && lost_.empty() && !stopped_) {
    if (!changed_.WaitUntil(mutex_, deadline)) break;
  }
  blocks_ = 0;
  return std::exchange(notes_, {});
}

std::optional<cache::BlockReader> EventQueue::TakeLost() {
  MutexLock lock(mutex_);
  if (lost_.empty() || !notes_.empty()) return std::nullopt;
  retold_ = *lost_.begin();
  return cache::BlockReader{owners_.at(retold_), retold_};
}

bool EventQueue::Lose(const std::string& worker) {
  MutexLock lock(mutex_);
  if (!owners_.contains(worker)) return false;
  lost_.insert(worker);
  changed_.NotifyAll();
  return true;
}

void EventQueue::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

EventQueue::Figures EventQueue::figures() const {
  MutexLock lock(mutex_);
  return {.waiting_blocks = blocks_, .dropped_blocks = dropped_};
}

}  // namespace tessera::cluster
