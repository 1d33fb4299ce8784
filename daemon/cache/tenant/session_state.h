// `SessionState` is one attached worker as the cache sees it: its memory, its reader slots and the
// sequences it owns. The connection that serves as its lease belongs to the serving layer.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "daemon/base/clock.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/cache/tail/control.h"
#include "daemon/cache/tail/tail.h"
#include "daemon/device/device.h"
#include "daemon/pool/account.h"
#include "proto/shm/layout.h"

namespace tessera::cache {

// The staging arena of one worker, which holds request tensors. The worker can write it at any
// time, so the daemon copies every byte before it uses it.
class Staging {
 public:
  static absl::StatusOr<std::unique_ptr<Staging>> Create(device::Device& device,
                                                         std::uint64_t bytes, pool::Account& node,
                                                         pool::Account& tenant);
  const device::Memory& memory() const { return *memory_; }
  // Returns the device address of a range. OUT_OF_RANGE names offset, length and arena size;
  // INVALID_ARGUMENT names an offset at which the device cannot read rows.
  absl::StatusOr<const std::byte*> Range(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  Staging() = default;
  std::unique_ptr<device::Memory> memory_;
  std::uint64_t alignment_ = 1;
  pool::Charge node_charge_;
  pool::Charge tenant_charge_;
};

class SessionState {
 public:
  struct Options {
    SessionId id;
    TenantId tenant_id;
    std::uint64_t secret = 0;
    std::uint64_t nonce = 0;
    std::string worker_name;
    std::string group;
    std::uint32_t rank = 0;
    std::uint32_t group_size = 1;
    std::string cache_salt;  // sets its prefixes apart; empty: none
    Clock::Duration pin_limit{};
    std::uint64_t staging_bytes = 0;
    std::uint64_t tail_extent_bytes = 0;
    device::Device* device = nullptr;
    pool::Account* node = nullptr;
    pool::Account* tenant = nullptr;
    pool::Account* heap = nullptr;
    Clock::TimePoint attached;
  };
  // RESOURCE_EXHAUSTED if `heap` has no room for what a connection and its session need.
  static absl::StatusOr<std::shared_ptr<SessionState>> Create(const Options& options);

  SessionId id() const { return options_.id; }
  TenantId tenant_id() const { return options_.tenant_id; }
  const Options& options() const { return options_; }
  const std::shared_ptr<Control>& control() const { return control_; }
  const std::shared_ptr<pool::PinSource>& pins() const { return pins_; }
  TailMemory& tails() const { return *tails_; }

  // Returns true exactly once, for the right nonce: the nonce opens the descriptor socket and is
  // single-use.
  bool TakeNonce(std::uint64_t nonce);
  bool mapped() const;

  // The session has ended: its memory counts no more, though a call may still hold this object.
  void ReturnCharge();

  // The arena that CreateStaging made; null: it was not called, or failed.
  const Staging* staging() const;
  // Idempotent. Allocating gigabytes takes about a second.
  absl::Status CreateStaging();
  // Returns FAILED_PRECONDITION if the worker has not mapped a staging arena.
  absl::StatusOr<const std::byte*> StagingRange(std::uint64_t offset, std::uint64_t bytes) const;

  void Own(SequenceId sequence);
  void Disown(SequenceId sequence);
  std::vector<SequenceId> Owned() const;

  // Tracks sequences whose tails are in this session's memory. Sequences with closed tails drop
  // out.
  void AddDecoding(const std::shared_ptr<Sequence>& sequence);
  std::vector<std::shared_ptr<Sequence>> Decoding();

  // Adds what the worker has counted of its steps since the last call: how many found the ring
  // full, and how long steps waited. The worker writes these counts; a hostile value only inflates
  // a metric.
  void CountSteps(TenantCounters& counters);

 private:
  explicit SessionState(const Options& options) : options_(options) {}

  const Options options_;
  std::shared_ptr<Control> control_;
  std::shared_ptr<pool::PinSource> pins_;
  std::shared_ptr<TailMemory> tails_;

  mutable Mutex mutex_;
  pool::Charge charge_ TESSERA_GUARDED_BY(mutex_);
  bool nonce_used_ TESSERA_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Staging> staging_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_set<SequenceId> owned_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<SequenceId, std::weak_ptr<Sequence>> decoding_ TESSERA_GUARDED_BY(mutex_);
  // The worker's counts at the last call of CountSteps.
  std::uint64_t ring_full_waits_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint64_t step_wait_nanoseconds_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::array<std::uint32_t, shm::kStepWaitBuckets> step_waits_ TESSERA_GUARDED_BY(mutex_){};
};

}  // namespace tessera::cache
