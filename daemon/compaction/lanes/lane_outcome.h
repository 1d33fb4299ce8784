// What compression has made of a lane, what it has left dense, and why. The one place where a
// reason is put into words.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"

namespace tessera::compaction {

// In the order of v1::CompressionReason, which explains them.
enum class DenseReason : std::uint8_t {
  kNone,
  kLossAboveLimit,
  kTooShort,
  kWaiting,
  kNotObserved,
  kNoMemory,
  kNothingNew,
  kPolicyDense,
  kSegmentOverhead,
  kValueOutOfRange,
  kNewest,
  kNothingToDrop,
  kOther,
};
inline constexpr std::size_t kDenseReasons = 13;

// "loss_above_limit": a label of metrics.
std::string_view NameOf(DenseReason reason);

// Whether an attempt may leave rows for it: the others are said of a lane when somebody asks.
constexpr bool IsCounted(DenseReason reason) {
  return reason != DenseReason::kNone && reason != DenseReason::kNothingNew &&
         reason != DenseReason::kPolicyDense;
}

// What the last attempt to compress a lane, or a layer, has left dense.
struct DenseRows {
  DenseReason reason = DenseReason::kNone;
  std::uint64_t first_position = 0;  // of the rows
  std::uint64_t tokens = 0;          // how many they are
  bool of_value = false;             // the loss is of values, not of keys
  double loss = 0;
  double limit = 0;
  std::uint64_t needs = 0;        // tokens that it takes in all; 0: unknown, or no number will do
  std::uint64_t min_segment = 0;  // of the policy, where that decided
  std::string message = {};       // of an attempt that failed

  std::uint64_t more_tokens() const { return needs - std::min(needs, tokens); }
};

// Of an attempt that failed.
DenseRows DenseBecause(const absl::Status& failed);

// Thread-safe.
class DenseRecord {
 public:
  void Set(DenseRows rows) {
    MutexLock lock(mutex_);
    rows_ = std::move(rows);
  }
  DenseRows Get() const {
    MutexLock lock(mutex_);
    return rows_;
  }
  // The sequence was cut to so many tokens: rows that have gone say nothing of later ones.
  void CutTo(std::uint64_t tokens) {
    MutexLock lock(mutex_);
    if (rows_.reason != DenseReason::kNone && rows_.first_position >= tokens) rows_ = {};
  }

 private:
  mutable Mutex mutex_;
  DenseRows rows_ TESSERA_GUARDED_BY(mutex_);
};

// In the order of v1::LaneState.
enum class LaneForm : std::uint8_t { kUnspecified, kCompressed, kPartly, kDense };

struct LaneOutcome {
  LaneForm form = LaneForm::kUnspecified;
  DenseRows dense;
  std::uint64_t compressed_entries = 0;
  std::uint64_t dense_entries = 0;
  std::uint64_t tokens = 0;  // that the entries are what is left of

  // Whether this one says more about its group: a larger loss, or more entries left dense.
  bool WorseThan(const LaneOutcome& other) const {
    return std::pair(dense.loss, dense_entries) > std::pair(other.dense.loss, other.dense_entries);
  }
};

// "left dense: loss of keys 0.285 is above loss_k 0.1 (segment of 4000 tokens, ...)"
std::string TextOf(const LaneOutcome& outcome);

}  // namespace tessera::compaction
