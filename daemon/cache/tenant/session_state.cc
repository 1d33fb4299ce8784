#include "daemon/cache/tenant/session_state.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "daemon/base/strings.h"
#include "proto/shm/layout.h"

namespace tessera::cache {
namespace {

// Of the heap: 58 KiB were measured for a session over gRPC, its connection and stream included.
constexpr std::uint64_t kSessionBytes = 64 << 10;

}  // namespace

absl::StatusOr<std::unique_ptr<Staging>> Staging::Create(device::Device& device,
                                                         std::uint64_t bytes, pool::Account& node,
                                                         pool::Account& tenant) {
  bytes = device::RoundUp(bytes, device.description().granularity);
  absl::StatusOr<pool::Charge> tenant_charge = tenant.Reserve(pool::MemoryTag::kStaging, bytes);
  if (!tenant_charge.ok()) return tenant_charge.status();
  absl::StatusOr<pool::Charge> node_charge = node.Reserve(pool::MemoryTag::kStaging, bytes);
  if (!node_charge.ok()) return node_charge.status();
  absl::StatusOr<std::unique_ptr<device::Memory>> memory =
      device.CreateWorkerMemory("tessera-staging", bytes);
  if (!memory.ok()) return memory.status();
  std::unique_ptr<Staging> staging(new Staging());
  staging->memory_ = *std::move(memory);
  staging->alignment_ = device.description().row_alignment;
  staging->node_charge_ = *std::move(node_charge);
  staging->tenant_charge_ = *std::move(tenant_charge);
  return staging;
}

absl::StatusOr<const std::byte*> Staging::Range(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset > memory_->bytes() || bytes > memory_->bytes() - offset) {
    return absl::OutOfRangeError(Concat("staging offset ", offset, " plus ", bytes,
                                        " bytes exceeds the staging arena of ", memory_->bytes(),
                                        " bytes"));
  }
  if (offset % alignment_ != 0) {
    return absl::InvalidArgumentError(Concat("staging offset ", offset, " is not a multiple of ",
                                             alignment_, ", the alignment this device requires"));
  }
  return memory_->data() + offset;
}

absl::StatusOr<std::shared_ptr<SessionState>> SessionState::Create(const Options& options) {
  absl::StatusOr<pool::Charge> charge =
      options.heap->Reserve(pool::MemoryTag::kState, kSessionBytes);
  if (!charge.ok()) return charge.status();
  absl::StatusOr<std::shared_ptr<Control>> control = Control::Create();
  if (!control.ok()) return control.status();
  std::shared_ptr<SessionState> session(new SessionState(options));
  {
    MutexLock lock(session->mutex_);
    session->charge_ = *std::move(charge);
  }
  session->pins_ = Control::Pins(*control);
  session->pins_->limit = options.pin_limit;
  session->control_ = *std::move(control);
  session->tails_ = TailMemory::Create({.device = options.device,
                                        .extent_bytes = options.tail_extent_bytes,
                                        .node = options.node,
                                        .tenant = options.tenant});
  return session;
}

bool SessionState::TakeNonce(std::uint64_t nonce) {
  MutexLock lock(mutex_);
  return nonce == options_.nonce && !std::exchange(nonce_used_, true);
}

bool SessionState::mapped() const {
  MutexLock lock(mutex_);
  return nonce_used_;
}

void SessionState::ReturnCharge() {
  pool::Charge none;
  MutexLock lock(mutex_);
  charge_ = std::move(none);
}

const Staging* SessionState::staging() const {
  MutexLock lock(mutex_);
  return staging_.get();
}

absl::Status SessionState::CreateStaging() {
  if (staging() != nullptr) return absl::OkStatus();
  // Without the lock, so that readers do not wait.
  absl::StatusOr<std::unique_ptr<Staging>> created =
      Staging::Create(*options_.device, options_.staging_bytes, *options_.node, *options_.tenant);
  if (!created.ok()) return created.status();
  MutexLock lock(mutex_);
  if (staging_ == nullptr) staging_ = *std::move(created);
  return absl::OkStatus();
}

absl::StatusOr<const std::byte*> SessionState::StagingRange(std::uint64_t offset,
                                                            std::uint64_t bytes) const {
  MutexLock lock(mutex_);
  if (staging_ == nullptr) {
    return absl::FailedPreconditionError(
        "the session has not mapped its staging arena; map it, or send the tensor inline");
  }
  return staging_->Range(offset, bytes);
}

void SessionState::Own(SequenceId sequence) {
  MutexLock lock(mutex_);
  owned_.insert(sequence);
}

void SessionState::Disown(SequenceId sequence) {
  MutexLock lock(mutex_);
  owned_.erase(sequence);
}

std::vector<SequenceId> SessionState::Owned() const {
  MutexLock lock(mutex_);
  return {owned_.begin(), owned_.end()};
}

void SessionState::AddDecoding(const std::shared_ptr<Sequence>& sequence) {
  MutexLock lock(mutex_);
  decoding_[sequence->id()] = sequence;
}

std::vector<std::shared_ptr<Sequence>> SessionState::Decoding() {
  std::vector<std::shared_ptr<Sequence>> sequences;
  MutexLock lock(mutex_);
  sequences.reserve(decoding_.size());
  for (auto it = decoding_.begin(); it != decoding_.end();) {
    const auto next = std::next(it);
    std::shared_ptr<Sequence> sequence = it->second.lock();
    if (sequence != nullptr && sequence->decoding()) {
      sequences.push_back(std::move(sequence));
    } else {
      decoding_.erase(it);
    }
    it = next;
  }
  return sequences;
}

namespace {

// What a worker added to a count since `before`, which becomes `now`. A count that went back added
// nothing, and no worker counts more between two calls than `most`.
std::uint64_t Added(std::uint64_t now, std::uint64_t& before, std::uint64_t most) {
  const std::uint64_t last = std::exchange(before, now);
  return now > last ? std::min(now - last, most) : 0;
}

}  // namespace

void SessionState::CountSteps(TenantCounters& counters) {
  constexpr std::uint64_t kMostWaits = 1 << 20;
  constexpr std::uint64_t kMostSteps = 1 << 30;
  constexpr std::uint64_t kMostNanoseconds = std::uint64_t{1} << 50;  // 13 days, of all threads
  const shm::ControlPage& page = control_->page();
  MutexLock lock(mutex_);
  counters.tail_full_waits.fetch_add(
      Added(page.ring_full_waits.load(std::memory_order_relaxed), ring_full_waits_, kMostWaits),
      std::memory_order_relaxed);
  counters.step_waits.AddToSum(
      std::chrono::nanoseconds(Added(page.step_wait_nanoseconds.load(std::memory_order_relaxed),
                                     step_wait_nanoseconds_, kMostNanoseconds)));
  for (std::size_t i = 0; i < step_waits_.size(); ++i) {
    const std::uint32_t now = page.step_waits[i].load(std::memory_order_relaxed);
    // Modulo 2^32, so that a count may wrap around. A larger difference is one that went back.
    const std::uint32_t added = now - std::exchange(step_waits_[i], now);
    if (added < kMostSteps) counters.step_waits.AddToBucket(i, added);
  }
}

}  // namespace tessera::cache
