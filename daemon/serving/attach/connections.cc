#include "daemon/serving/attach/connections.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::serving {

void Connections::Opened(cache::Tenant& tenant, std::shared_ptr<cache::SessionState> session,
                         std::shared_ptr<Lease> lease) {
  services_.metrics->sessions_total.Increment();
  LogSession("session attached", {{"session", session->id().value()},
                                  {"tenant", tenant.name()},
                                  {"worker", session->options().worker_name}});
  {
    MutexLock lock(mutex_);
    entries_[session->id()] = {&tenant, session, std::move(lease)};
  }
  watcher_->AddSession(std::move(session));
}

void Connections::End(SessionId id, metrics::SessionEnd reason, const absl::Status& cut) {
  Entry entry;
  {
    MutexLock lock(mutex_);
    const auto it = entries_.find(id);
    if (it == entries_.end()) return;
    entry = std::move(it->second);
    entries_.erase(it);
    ++freeing_;
    if (entries_.empty()) ended_.NotifyAll();
  }
  entry.lease->Cut(cut);
  entry.lease.reset();
  watcher_->RemoveSession(id);
  services_.metrics->session_ends_total.Increment(reason);
  const TenantId tenant = entry.tenant->options().id;
  // In the background, so that no other worker's call waits for it; before seals and pressure jobs.
  services_.scheduler->Submit({.name = "end-session",
                               .priority = JobPriority::kTails,
                               .tenant = tenant,
                               .owner = id.value()},
                              [this, id, reason, entry = std::move(entry)]() mutable {
                                Free(id, reason, std::move(entry));
                              });
}

void Connections::Free(SessionId id, metrics::SessionEnd reason, Entry entry) {
  const std::string worker = entry.session->options().worker_name;
  const Clock::Duration age = services_.clock->Now() - entry.session->options().attached;
  entry.session.reset();
  const cache::Tenant::Freed freed = entry.tenant->EndSession(id);
  services_.node->SessionEnded(*entry.tenant);
  LogSession(
      "session ended",
      {{"session", id.value()},
       {"reason", metrics::kLabelValues<metrics::SessionEnd>[static_cast<std::size_t>(reason)]},
       {"tenant", entry.tenant->name()},
       {"worker", worker},
       {"age_seconds", std::chrono::duration<double>(age).count()},
       {"sequences", freed.sequences},
       {"freed_bytes", freed.bytes}});
  MutexLock lock(mutex_);
  if (--freeing_ == 0) ended_.NotifyAll();
}

void Connections::LogSession(std::string_view event, std::initializer_list<LogField> fields) {
  const std::optional<std::uint64_t> unsaid = lines_.Say(services_.clock->Now());
  if (!unsaid.has_value()) return;
  std::vector<LogField> all(fields);
  if (*unsaid > 0) all.push_back({"like_this_before", *unsaid});
  services_.logger->Log(LogLevel::kInfo, event, all);
}

std::size_t Connections::WaitUntilFreed(Clock::TimePoint deadline) {
  MutexLock lock(mutex_);
  while (freeing_ != 0 && ended_.WaitUntil(mutex_, deadline)) {
  }
  return freeing_;
}

std::vector<Connections::Entry> Connections::All() const {
  std::vector<Entry> entries;
  MutexLock lock(mutex_);
  for (const auto& [id, entry] : entries_) entries.push_back(entry);
  return entries;
}

void Connections::EndAll(metrics::SessionEnd reason, const absl::Status& cut) {
  for (const Entry& entry : All()) End(entry.session->id(), reason, cut);
}

void Connections::Broadcast(const v1::AttachResponse& message) {
  for (const Entry& entry : All()) entry.lease->Push(message);
}

std::size_t Connections::size() const {
  MutexLock lock(mutex_);
  return entries_.size();
}

void Connections::WaitUntilNone(Clock::TimePoint deadline) {
  ShortenDrain(deadline);
  MutexLock lock(mutex_);
  while (!entries_.empty()) {
    if (!ended_.WaitUntil(mutex_, deadline_)) return;
  }
}

void Connections::ShortenDrain(Clock::TimePoint deadline) {
  MutexLock lock(mutex_);
  deadline_ = std::min(deadline_, deadline);
  ended_.NotifyAll();
}

void Connections::DescriptorSocketClosed(SessionId session) {
  End(session, metrics::SessionEnd::kLost,
      absl::UnavailableError("the session's descriptor socket was closed"));
}

void Connections::PoolExtentsRemoved(cache::Tenant& tenant) {
  v1::AttachResponse message;
  message.mutable_pool_changed();
  for (const Entry& entry : All()) {
    if (entry.tenant == &tenant) entry.lease->Push(message);
  }
}

}  // namespace tessera::serving
