#include "daemon/compaction/lanes/lane_state.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"

namespace tessera::compaction {

void LaneState::Meet(const cache::OpenRun& run) {
  if (run.first_position == first_position_ && run.provisional_entries() == entries_) return;
  Reset();
  first_position_ = run.first_position;
  // Tiles without statistics: their moments are computed from raw rows when needed.
  entries_ = run.provisional_entries();
}

void LaneState::Reset() {
  begun.reset();
  first_position_ = entries_ = 0;
  moments_.reset();
  charge_.Reset();
  window_.clear();
  monitored_key_loss_ = monitored_value_loss_ = 0;
}

void LaneState::Observe(const kernels::LaneRows& rows, const kernels::Operations& operations,
                        pool::Account& budget) {
  if (entries_ == 0) {
    LaneMoments fresh(rows.keys.head_dim);
    absl::StatusOr<pool::Charge> charge =
        budget.Reserve(pool::MemoryTag::kRawCopies, fresh.key.bytes() + fresh.value.bytes());
    if (charge.ok()) {
      moments_.emplace(std::move(fresh));
      charge_ = *std::move(charge);
    }
  }
  entries_ += rows.keys.count;
  if (moments_.has_value()) moments_->Add(rows, operations);
}

void LaneState::ObserveLoss(const kernels::Loss& mean_of_tile, std::uint64_t window_tokens) {
  window_.push_back(mean_of_tile);
  while (window_.size() > 1 && window_.size() * kernels::kTileEntries > window_tokens) {
    window_.erase(window_.begin());
  }
  const kernels::Loss loss = MeanLoss();
  monitored_key_loss_ = static_cast<float>(loss.key);
  monitored_value_loss_ = static_cast<float>(loss.value);
}

const LaneMoments* LaneState::MomentsOf(std::uint64_t entries) const {
  const bool all = moments_.has_value() && moments_->key.rows() == entries_ && entries == entries_;
  return all ? &*moments_ : nullptr;
}

std::optional<kernels::Loss> LaneState::WindowLoss(std::uint64_t tokens) const {
  // In whole tiles: a full window may cover up to one tile less than `tokens`.
  const std::uint64_t most = std::max<std::uint64_t>(tokens / kernels::kTileEntries, 1);
  const std::uint64_t wanted = std::min(most, entries_ / kernels::kTileEntries);
  if (window_.empty() || window_.size() < wanted) return std::nullopt;
  return MeanLoss();
}

kernels::Loss LaneState::MeanLoss() const {
  kernels::Loss sum;
  for (const kernels::Loss& loss : window_) {
    sum.key += loss.key;
    sum.value += loss.value;
  }
  const auto count = static_cast<double>(window_.size());
  return {.key = sum.key / count, .value = sum.value / count};
}

}  // namespace tessera::compaction
