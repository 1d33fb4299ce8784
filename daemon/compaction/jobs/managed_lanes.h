// What compaction keeps for each lane of a sequence. A sequence without rows has none of it,
// because a model may have thousands of lanes and a worker may hold thousands of idle sequences.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/compaction/lanes/lane_outcome.h"
#include "daemon/compaction/lanes/lane_state.h"
#include "daemon/compaction/lanes/seal_requests.h"
#include "daemon/pool/account.h"

namespace tessera::compaction {

// The lock and the pending work of a lane. Shared by the ManagedSequences that a sequence has under
// its successive policies.
struct LaneWork {
  Mutex mutex;  // held by the job that works on the lane
  SealRequests seals;
  // Whether a deferred seal is in the queue for memory (DeferredSeals). Otherwise the lane's next
  // rows request it again.
  std::atomic<bool> seal_in_line{false};
  // Tiles arrived while another job worked on the lane; that job queues them when it is done.
  std::atomic<bool> tiles_left{false};
};

struct ManagedLane {
  std::shared_ptr<LaneWork> work;
  LaneState state TESSERA_GUARDED_BY(work->mutex);
  DenseRecord left_dense;  // what the last seal left dense
};

// Thread-safe. The lanes are made together, once, and charged to the tenant.
class ManagedLanes {
 public:
  ManagedLanes(pool::Account* heap, std::uint32_t count) : heap_(heap), count_(count) {}
  ~ManagedLanes() { delete made_.load(); }
  ManagedLanes(const ManagedLanes&) = delete;
  ManagedLanes& operator=(const ManagedLanes&) = delete;

  // Idempotent. RESOURCE_EXHAUSTED: the tenant or the node has no room for them.
  absl::Status Make() {
    if (made_.load(std::memory_order_acquire) != nullptr) return absl::OkStatus();
    absl::StatusOr<pool::Charge> charge =
        heap_->Reserve(pool::MemoryTag::kState, count_ * kLaneBytes);
    if (!charge.ok()) return charge.status();
    MakeWith(*std::move(charge));
    return absl::OkStatus();
  }
  // None until Make.
  std::span<ManagedLane> all() const {
    Made* const made = made_.load(std::memory_order_acquire);
    return made == nullptr ? std::span<ManagedLane>() : std::span(made->lanes);
  }
  // Null until Make.
  const ManagedLane* Find(std::uint32_t index) const {
    const std::span<ManagedLane> lanes = all();
    return lanes.empty() ? nullptr : &lanes[index];
  }
  // Makes the lanes if that was not done, even beyond the tenant's limit: a job that has work to do
  // cannot be refused. A sequence makes them before its rows, so this happens only if a policy is
  // set at that moment.
  ManagedLane& at(std::uint32_t index) {
    if (all().empty() && !Make().ok()) MakeWith(pool::Charge());
    return all()[index];
  }

 private:
  // The last part is for what lanes allocate later: losses of tiles, reasons of failures.
  static constexpr std::uint64_t kLaneBytes = sizeof(ManagedLane) + sizeof(LaneWork) + 128;
  struct Made {
    pool::Charge charge;
    std::vector<ManagedLane> lanes;
  };
  void MakeWith(pool::Charge charge) {
    auto made = std::make_unique<Made>();
    made->charge = std::move(charge);
    made->lanes = std::vector<ManagedLane>(count_);
    const std::shared_ptr<LaneWork[]> works(new LaneWork[count_]);
    for (std::uint32_t i = 0; i < count_; ++i) {
      made->lanes[i].work = std::shared_ptr<LaneWork>(works, &works[i]);
    }
    Made* expected = nullptr;  // otherwise another thread was first
    if (made_.compare_exchange_strong(expected, made.get())) (void)made.release();
  }

  pool::Account* const heap_;
  const std::uint32_t count_;
  std::atomic<Made*> made_{nullptr};
};

}  // namespace tessera::compaction
