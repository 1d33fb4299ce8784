// What compaction keeps with a sequence: its policy, and what it has learnt of each lane.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/cache/sequence.h"
#include "daemon/compaction/lane_coder.h"
#include "daemon/compaction/lane_state.h"
#include "daemon/policies/policy.h"

namespace tessera::compaction {

class ManagedSequence final : public cache::Companion {
 public:
  struct ManagedLane {
    Mutex mutex;  // held by the job that works on the lane
    LaneState state TESSERA_GUARDED_BY(mutex);
    // 1 + the Cut that a seal waits for; 0: none waits.
    std::atomic<std::uint8_t> seal_wanted{0};
  };

  ManagedSequence(policies::Policy policy, std::uint32_t lanes)
      : policy_(std::move(policy)), lanes_(lanes) {}

  const policies::Policy& policy() const { return policy_; }
  ManagedLane& lane(std::uint32_t index) { return lanes_[index]; }

  // True for the first that asks since the job began.
  bool WantTiles() { return !tiles_wanted_.exchange(true); }
  void TilesBegin() { tiles_wanted_.store(false); }

  // True where no seal of the lane was wanted before. The most thorough cut is what is done.
  bool WantSeal(std::uint32_t lane, LaneCoder::Cut cut) {
    const auto wanted = static_cast<std::uint8_t>(static_cast<int>(cut) + 1);
    std::atomic<std::uint8_t>& waits = lanes_[lane].seal_wanted;
    std::uint8_t before = waits.load();
    while (before < wanted && !waits.compare_exchange_weak(before, wanted)) {
    }
    return before == 0;
  }
  // Nothing: another job has taken it on.
  std::optional<LaneCoder::Cut> SealBegins(std::uint32_t lane) {
    const std::uint8_t wanted = lanes_[lane].seal_wanted.exchange(0);
    if (wanted == 0) return std::nullopt;
    return static_cast<LaneCoder::Cut>(wanted - 1);
  }

  // Null where the sequence has no policy that does anything.
  static std::shared_ptr<ManagedSequence> Of(const cache::Sequence& sequence) {
    return std::static_pointer_cast<ManagedSequence>(sequence.companion());
  }

 private:
  const policies::Policy policy_;
  std::atomic<bool> tiles_wanted_{false};
  std::vector<ManagedLane> lanes_;
};

}  // namespace tessera::compaction
