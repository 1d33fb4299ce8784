// Statistics of a lane's open run while it grows: second moments of its rows, and how much the
// previous segment's strategy loses of them.
//
// They start over when the run is a different one: after a seal, a fork or a cut.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/cache/segment/book_shelf.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/cache/segment/sealed_rows.h"
#include "daemon/pool/account.h"
#include "kernels/strategy/loss.h"
#include "kernels/strategy/moments.h"

namespace tessera::compaction {

struct LaneMoments {
  explicit LaneMoments(std::uint32_t head_dim) : key(head_dim), value(head_dim) {}
  void Add(const kernels::LaneRows& rows, const kernels::Operations& operations) {
    key.Add(rows.keys, operations);
    value.Add(rows.values, operations);
  }
  kernels::Moments key;
  kernels::Moments value;
};

// Owned by ManagedSequence. Used by one thread at a time, inside Sequence::Recode of its lane. Only
// MonitoredLoss may be called by any thread at any time.
class LaneState {
 public:
  // Starts over if the state is of another run.
  void Meet(const cache::OpenRun& run);
  void Reset();

  // Adds full tiles that were just encoded provisionally, after all earlier ones. Moments are
  // skipped if `budget` has no room: they can be recomputed from the raw rows.
  void Observe(const kernels::LaneRows& rows, const kernels::Operations& operations,
               pool::Account& budget);
  void ObserveLoss(const kernels::Loss& mean_of_tile, std::uint64_t window_tokens);

  // Moments of the first `entries` of the run; null unless they cover exactly these.
  const LaneMoments* MomentsOf(std::uint64_t entries) const;
  // Mean loss over the newest `tokens` tokens, or over the whole run if it is shorter. nullopt if
  // fewer were measured, as after a fork.
  std::optional<kernels::Loss> WindowLoss(std::uint64_t tokens) const;
  // The mean loss of the tokens measured so far, rounded, for monitoring; 0: none.
  kernels::Loss MonitoredLoss() const {
    return {.key = monitored_key_loss_, .value = monitored_value_loss_};
  }

  // A seal that continues in another job.
  struct ContinuedSeal {
    cache::SealedRows rows;  // identifies the rows of `segments`
    std::vector<std::shared_ptr<cache::Segment>> segments;
    std::size_t taken_over;  // how many of the first segments were adopted (cache::LaneSwap)
  };
  std::optional<ContinuedSeal> begun;

  // For planes with book=own: the book of the segment that grows.
  std::shared_ptr<const cache::LaneBook> own_book;
  // For planes with book=auto: this lane has seen that the book has drifted. It makes the next
  // version as soon as it holds enough dense rows.
  bool waits_for_book = false;

  // How many entries get no raw copies, because the budget was spent.
  std::uint64_t entries_without_raw = 0;

 private:
  std::uint64_t first_position_ = 0;
  std::uint64_t entries_ = 0;  // added by Observe, or skipped by Meet
  std::optional<LaneMoments> moments_;
  pool::Charge charge_;
  std::vector<kernels::Loss> window_;  // mean loss of each of the newest tiles
  std::atomic<float> monitored_key_loss_{0};
  std::atomic<float> monitored_value_loss_{0};

  kernels::Loss MeanLoss() const;  // the window must not be empty
};

}  // namespace tessera::compaction
