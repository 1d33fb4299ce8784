// What is learnt of a lane's open run while it grows: second moments of its rows, what the strategy
// before loses of them. Made anew where the run is another one: after a seal, a fork, a cut.
//
// Used by one thread at a time: inside Sequence::Recode of its lane. Beside that anybody may call
// ShownLoss.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

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

class LaneState {
 public:
  // Forgets what is not of this run.
  void Meet(const cache::OpenRun& run);
  void Reset();

  // Full tiles that were just encoded provisionally, behind those seen before. Moments are kept
  // only where `budget` has room for them: they can be made again from the raw rows.
  void Observe(const kernels::LaneRows& rows, const kernels::Operations& operations,
               pool::Account& budget);
  void ObserveLoss(const kernels::Loss& mean_of_tile, std::uint64_t window_tokens);

  // Of the first `entries` of the run; null where they are not all in it.
  const LaneMoments* MomentsOf(std::uint64_t entries) const;
  // The mean over the newest so many tokens, or all of the run where it has fewer; nothing where
  // not so many have been seen: after a fork, say.
  std::optional<kernels::Loss> WindowLoss(std::uint64_t tokens) const;
  // That over what has been seen of them, rounded, for whoever looks on; 0: nothing.
  kernels::Loss ShownLoss() const { return {.key = shown_key_loss_, .value = shown_value_loss_}; }

  // Of a seal that goes on in another job.
  struct BegunSeal {
    cache::SealedRows rows;  // finds `segments` again where the rows are still there
    std::vector<std::shared_ptr<cache::Segment>> segments;
    std::size_t taken_over;  // the first so many of these (cache::LaneSwap)
  };
  std::optional<BegunSeal> begun;

  // Entries for which no raw rows are to be kept, because the budget was spent.
  std::uint64_t without_raw = 0;

 private:
  std::uint64_t first_position_ = 0;
  std::uint64_t entries_ = 0;  // seen
  std::optional<LaneMoments> moments_;
  pool::Charge charge_;
  std::deque<kernels::Loss> window_;  // one for each tile
  std::atomic<float> shown_key_loss_{0};
  std::atomic<float> shown_value_loss_{0};

  kernels::Loss MeanLoss() const;  // of a window that is not empty
};

}  // namespace tessera::compaction
