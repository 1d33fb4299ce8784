#include "daemon/base/fair_queue.h"

#include <utility>

namespace tessera {

void FairQueue::Push(JobSpec spec, Job job, Clock::TimePoint submitted) {
  const auto priority = static_cast<std::size_t>(spec.priority);
  Owners& owners = priorities_[priority].Of(spec.tenant);
  const std::uint64_t owner = spec.owner;
  const bool is_continuation = spec.is_continuation;
  owners.Of(owner).Push({std::move(spec), std::move(job), submitted});
  if (is_continuation) owners.Prefer(owner);
  ++sizes_[priority];
}

std::optional<FairQueue::Entry> FairQueue::Pop(JobPriority last) {
  for (std::size_t priority = 0; priority <= static_cast<std::size_t>(last); ++priority) {
    if (priorities_[priority].empty()) continue;
    --sizes_[priority];
    return priorities_[priority].Pop();
  }
  return std::nullopt;
}

std::size_t FairQueue::size(JobPriority priority) const {
  return sizes_[static_cast<std::size_t>(priority)];
}

}  // namespace tessera
