#include "daemon/cache/tenant/session_state.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "daemon/base/strings.h"
#include "proto/shm/layout.h"

namespace tessera::cache {

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
  absl::StatusOr<std::shared_ptr<Control>> control = Control::Create();
  if (!control.ok()) return control.status();
  std::shared_ptr<SessionState> session(new SessionState(options));
  session->pins_ = Control::Pins(*control);
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

absl::StatusOr<const Staging*> SessionState::staging() {
  {
    MutexLock lock(mutex_);
    if (staging_ != nullptr) return staging_.get();
  }
  // Created without the lock: allocating gigabytes takes about a second, and readers must not wait.
  absl::StatusOr<std::unique_ptr<Staging>> created =
      Staging::Create(*options_.device, options_.staging_bytes, *options_.node, *options_.tenant);
  if (!created.ok()) return created.status();
  MutexLock lock(mutex_);
  if (staging_ == nullptr) staging_ = *std::move(created);
  return staging_.get();
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

std::uint64_t SessionState::TakeRingFullWaits() {
  const std::uint64_t now = control_->page().ring_full_waits.load(std::memory_order_relaxed);
  MutexLock lock(mutex_);
  const std::uint64_t before = std::exchange(ring_full_waits_, now);
  constexpr std::uint64_t kMostAtOnce = 1 << 20;  // no worker waits so often between two calls
  return now > before ? std::min(now - before, kMostAtOnce) : 0;
}

}  // namespace tessera::cache
