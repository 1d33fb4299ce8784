// The outcome of compressing a lane: what is compressed, what is left dense, and why. TextOf is the
// only place that turns a reason into a sentence.
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

// The label in metrics, such as "loss_above_limit".
std::string_view NameOf(DenseReason reason);

// Whether attempts are counted by this reason. The others only describe a lane in an answer.
constexpr bool IsCounted(DenseReason reason) {
  return reason != DenseReason::kNone && reason != DenseReason::kNothingNew &&
         reason != DenseReason::kPolicyDense;
}

// What the last attempt to compress a lane, or a layer, has left dense.
struct DenseRows {
  DenseReason reason = DenseReason::kNone;
  std::uint64_t first_position = 0;  // position of the first row
  std::uint64_t tokens = 0;          // number of rows
  bool of_value = false;             // the loss is of values, not of keys
  double loss = 0;
  double limit = 0;
  std::uint64_t needs = 0;        // total tokens needed; 0: unknown, or more tokens do not help
  std::uint64_t min_segment = 0;  // the policy's, if it was the reason; else 0
  std::string message = {};       // the error of a failed attempt

  std::uint64_t more_tokens() const { return needs - std::min(needs, tokens); }
};

// The rows that a failed attempt has left dense.
DenseRows DenseBecause(const absl::Status& failed);

// The last DenseRows of a lane or layer. Thread-safe.
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
  // The sequence was truncated to `tokens`: forgets rows that were removed.
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
  std::uint64_t tokens = 0;  // number of tokens that the lane was given

  // Whether this outcome represents its group better: a larger loss, or more dense entries.
  bool WorseThan(const LaneOutcome& other) const {
    return std::pair(dense.loss, dense_entries) > std::pair(other.dense.loss, other.dense_entries);
  }
};

// "left dense: loss of keys 0.285 is above loss_k 0.1 (segment of 4000 tokens, ...)"
std::string TextOf(const LaneOutcome& outcome);

}  // namespace tessera::compaction
