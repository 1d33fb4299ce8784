#include "daemon/pool/epochs.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"

namespace tessera::pool {

namespace {
// Polling interval for readers that may have moved on by themselves.
constexpr Clock::Duration kPoll = std::chrono::milliseconds(10);
}  // namespace

Epochs::~Epochs() {
  // No reader is left when a tenant is destroyed: the daemon is exiting.
  for (Batch& batch : waiting_) std::move(batch.garbage)();
}

void Epochs::AddSource(std::shared_ptr<PinSource> source) {
  MutexLock lock(mutex_);
  sources_.push_back(std::move(source));
}

void Epochs::RemoveSource(const PinSource* source) {
  {
    MutexLock lock(mutex_);
    std::erase_if(sources_, [&](const auto& held) { return held.get() == source; });
    for (Batch& batch : waiting_) {
      std::erase_if(batch.blockers, [&](const Blocker& b) { return b.source.get() == source; });
    }
  }
  Collect();
}

std::vector<Epochs::Blocker> Epochs::BlockersOf(std::uint64_t epoch) {
  std::vector<Blocker> blockers;
  for (const std::shared_ptr<PinSource>& source : sources_) {
    for (std::uint32_t i = 0; i < source->count; ++i) {
      const std::uint64_t word = source->slots[i].word.load(std::memory_order_seq_cst);
      if (word == shm::kPinFree || word == shm::kPinRevoked) continue;
      if (shm::PinnedEpoch(word) <= epoch) blockers.push_back({source, i, word});
    }
  }
  return blockers;
}

void Epochs::Retire(Garbage garbage, std::uint64_t bytes) {
  bool started_waiting = false;
  {
    MutexLock lock(mutex_);
    const std::uint64_t retired = options_.epoch->fetch_add(1, std::memory_order_seq_cst);
    std::vector<Blocker> blockers = BlockersOf(retired);
    if (!blockers.empty()) {
      waiting_bytes_.fetch_add(bytes, std::memory_order_relaxed);
      started_waiting = waiting_.empty();
      waiting_.push_back({std::move(garbage), bytes, options_.clock->Now(), std::move(blockers)});
      garbage = nullptr;
    }
  }
  if (garbage) {
    std::move(garbage)();
  } else if (started_waiting && options_.on_waiting) {
    options_.on_waiting();
  }
}

void Epochs::Thin(Batch& batch, Clock::TimePoint now) {
  std::erase_if(batch.blockers, [&](const Blocker& blocker) {
    shm::Word& slot = blocker.source->slots[blocker.slot].word;
    if (slot.load(std::memory_order_seq_cst) != blocker.word) return true;
    const Clock::Duration limit = blocker.source->limit.value_or(options_.pin_limit);
    if (now - batch.retired < limit || !blocker.source->revocable) return false;
    // If the exchange fails, the reader has just moved on. Either way it no longer blocks.
    if (shm::Revoke(slot, blocker.word)) revoked_.fetch_add(1, std::memory_order_relaxed);
    return true;
  });
}

std::optional<Clock::Duration> Epochs::Collect() {
  std::list<Batch> done;
  std::optional<Clock::Duration> again;
  {
    MutexLock lock(mutex_);
    if (waiting_.empty()) return std::nullopt;
    const Clock::TimePoint now = options_.clock->Now();
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto next = std::next(it);
      Thin(*it, now);
      if (it->blockers.empty()) done.splice(done.end(), waiting_, it);
      it = next;
    }
    if (!waiting_.empty()) again = kPoll;
  }
  for (Batch& batch : done) {
    waiting_bytes_.fetch_sub(batch.bytes, std::memory_order_relaxed);
    std::move(batch.garbage)();
  }
  return again;
}

std::uint32_t Epochs::Pinned(const PinSource& source) {
  std::uint32_t pinned = 0;
  for (std::uint32_t i = 0; i < source.count; ++i) {
    // seq_cst: a caller that sees the pin gone also sees what was committed under it.
    const std::uint64_t word = source.slots[i].word.load(std::memory_order_seq_cst);
    pinned += word != shm::kPinFree && word != shm::kPinRevoked;
  }
  return pinned;
}

}  // namespace tessera::pool
