// One decode iteration of a batch: begin, append and attend layer by layer, end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "kernels/dispatch/attend.h"
#include "kernels/format/element.h"

namespace tessera::client {

struct StepOptions {
  std::uint32_t new_tokens = 1;  // of each sequence
  // Where they differ: one count per sequence, each at least 1, instead of `new_tokens`.
  std::span<const std::uint32_t> new_tokens_each;
  // How long to wait for space in the tail rings.
  Clock::Duration timeout = std::chrono::seconds(1);
  // Runs the parts of each attention call; not owned, null: the calling thread alone.
  kernels::Executor* executor = nullptr;
  // A cudaStream_t, where the session's memory is a GPU's: the step's kernels run in its order.
  // Null: on a stream of the step's own, so tensors must be complete before each call.
  void* cuda_stream = nullptr;
};

// Dense rows of one layer in the model's type, token after token, sequence after sequence: where
// every sequence has n new tokens, [batch][n][heads][head_dim].
//
// Where the session maps a GPU's memory they may be device memory, at multiples of 16 bytes, which
// must stay as it is until the step's kernels are through with it; or host memory, which is copied,
// a wait per layer. Results are there once End has returned (or in StepOptions::cuda_stream's
// order).
struct StepTensors {
  std::span<const std::byte> key;    // kv heads
  std::span<const std::byte> value;  // kv heads
  std::span<const std::byte> query;  // query heads
  std::span<std::byte> output;       // query heads, in `output_type`
  std::span<float> lse;              // [batch][n][query heads], natural log; empty: not wanted
  kernels::ElementType output_type = kernels::ElementType::kFp32;  // or the model's
  bool causal = true;  // a query sees its own position and earlier ones
  // What is read of segments that have block summaries; unset: what each sequence's policy says,
  // and everything under a policy that does not. A rate of 1 reads everything. All new tokens of a
  // sequence share a choice, so there are kMaxSelectingTokens of them at most. On a GPU a rule that
  // differs from the call's before costs an upload.
  std::optional<kernels::SelectionRule> selection;
};

inline constexpr std::uint32_t kMaxSelectingTokens = 256;  // the daemon's limit, too

// How a door performs a step.
class StepEngine {
 public:
  virtual ~StepEngine() = default;
  virtual absl::Status Append(std::uint32_t layer, std::span<const std::byte> key,
                              std::span<const std::byte> value) = 0;
  virtual absl::Status Attend(std::uint32_t layer, const StepTensors& tensors) = 0;
  virtual absl::Status AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) = 0;
  virtual absl::Status End(std::span<const std::uint32_t> accepted) = 0;
  virtual bool open() const = 0;
  virtual void Abandon() = 0;
  // It is over, and the caller is done with it: the next call, of any thread, may begin another
  // step in its place.
  virtual void Release() = 0;
};

// Used by one thread at a time; other steps, of other sequences, may run on other threads.
//
// What Attend wrote counts only once End has returned OK. ABORTED, from any call, means that the
// daemon took the step's pin back: nothing was committed, and the caller does the same step again
// from BeginStep. UNAVAILABLE means that the lease is lost. What ended a step early, all of its
// later calls answer too, so that End has the last word.
class Step {
 public:
  Step() = default;
  explicit Step(std::shared_ptr<StepEngine> engine) : engine_(std::move(engine)) {}
  Step(Step&&) noexcept = default;
  Step& operator=(Step&& other) noexcept {
    if (this != &other) {
      Abandon();
      engine_ = std::move(other.engine_);
      ended_by_ = std::move(other.ended_by_);
    }
    return *this;
  }
  ~Step() { Abandon(); }

  // Writes the new tokens' rows of one layer. Once per layer and step.
  absl::Status Append(std::uint32_t layer, std::span<const std::byte> key,
                      std::span<const std::byte> value);
  // Attends over what the layer holds: the new tokens are among it once they have been appended.
  // Query i of a sequence stands at its committed count + i.
  absl::Status Attend(std::uint32_t layer, const StepTensors& tensors);
  // Both.
  absl::Status AppendAndAttend(std::uint32_t layer, const StepTensors& tensors);

  // Commits the new tokens of every sequence, or the first `accepted[s]` of sequence s (speculative
  // decoding). FAILED_PRECONDITION where layers are missing, INVALID_ARGUMENT where a count does
  // not fit: the step then stays open. After anything else it is over.
  absl::Status End() { return End({}); }
  absl::Status End(std::span<const std::uint32_t> accepted);

  // Ends the step with nothing committed. What the destructor does.
  void Abandon();
  bool open() const { return engine_ != nullptr && engine_->open(); }

 private:
  absl::Status Over() const;
  absl::Status After(absl::Status status);

  std::shared_ptr<StepEngine> engine_;
  absl::Status ended_by_;
};

}  // namespace tessera::client
