// One attached worker, as the cache knows it: its memory, its reader slots, what it owns. The
// connection that is its lease belongs to the serving layer.
#pragma once

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

namespace tessera::cache {

// The worker's bulk memory: tensors of requests. Written by the worker at any time, so every byte
// that is used from it is copied first.
class Staging {
 public:
  static absl::StatusOr<std::unique_ptr<Staging>> Create(device::Device& device,
                                                         std::uint64_t bytes, pool::Account& node,
                                                         pool::Account& tenant);
  const device::Memory& memory() const { return *memory_; }
  // On the device. OUT_OF_RANGE names offset, length and the arena's size, INVALID_ARGUMENT an
  // offset that the device cannot read rows at.
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
    std::uint64_t staging_bytes = 0;
    std::uint64_t tail_extent_bytes = 0;
    device::Device* device = nullptr;
    pool::Account* node = nullptr;
    pool::Account* tenant = nullptr;
    Clock::TimePoint attached;
  };
  static absl::StatusOr<std::shared_ptr<SessionState>> Create(const Options& options);

  SessionId id() const { return options_.id; }
  TenantId tenant_id() const { return options_.tenant_id; }
  const Options& options() const { return options_; }
  const std::shared_ptr<Control>& control() const { return control_; }
  const std::shared_ptr<pool::PinSource>& pins() const { return pins_; }
  TailMemory& tails() const { return *tails_; }

  // True once, for the right nonce: it opens the descriptor socket and is used up.
  bool TakeNonce(std::uint64_t nonce);
  bool mapped() const;

  // Created when the worker first asks for it.
  absl::StatusOr<const Staging*> staging();
  // FAILED_PRECONDITION where the worker has not mapped any.
  absl::StatusOr<const std::byte*> StagingRange(std::uint64_t offset, std::uint64_t bytes) const;

  void Own(SequenceId sequence);
  void Disown(SequenceId sequence);
  std::vector<SequenceId> Owned() const;

  // Sequences whose tails lie in this session's memory. Those that have closed theirs drop out.
  void AddDecoding(const std::shared_ptr<Sequence>& sequence);
  std::vector<std::shared_ptr<Sequence>> Decoding();

  // How often a step of this worker found its ring full since the last call; a hostile count does
  // no more than raise a figure.
  std::uint64_t TakeRingFullWaits();

 private:
  explicit SessionState(const Options& options) : options_(options) {}

  const Options options_;
  std::shared_ptr<Control> control_;
  std::shared_ptr<pool::PinSource> pins_;
  std::shared_ptr<TailMemory> tails_;

  mutable Mutex mutex_;
  bool nonce_used_ TESSERA_GUARDED_BY(mutex_) = false;
  std::unique_ptr<Staging> staging_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_set<SequenceId> owned_ TESSERA_GUARDED_BY(mutex_);
  absl::flat_hash_map<SequenceId, std::weak_ptr<Sequence>> decoding_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t ring_full_waits_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera::cache
