// One decode iteration of a batch: begin, append and attend layer by layer, end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "tessera/compression.h"
#include "tessera/model.h"

namespace tessera::client {

class StepEngine;

// Runs the parts of an attention call. The caller owns the threads; the library starts none.
class Executor {
 public:
  using Task = void (*)(void* context, std::uint32_t index);
  virtual ~Executor() = default;
  // Runs `task(context, i)` for every i in [0, tasks), in any order, on any threads, and returns
  // when all are done.
  virtual void ParallelFor(std::uint32_t tasks, Task task, void* context) = 0;
};

struct StepOptions {
  std::uint32_t new_tokens = 1;  // of each sequence
  // One count per sequence, each at least 1, instead of `new_tokens`. Empty: all have `new_tokens`.
  std::span<const std::uint32_t> new_tokens_each;
  // How long to wait for space in the tail rings.
  std::chrono::nanoseconds timeout = std::chrono::seconds(1);
  // Not owned; null: the calling thread alone.
  Executor* executor = nullptr;
  // A cudaStream_t, if the session's memory is on a GPU: the step's kernels run in its order.
  // Null: a stream that belongs to the step, so tensors must be complete before each call.
  void* cuda_stream = nullptr;
};

// Dense rows of one layer in the model's type, token after token, sequence after sequence: if every
// sequence has n new tokens, [batch][n][heads][head_dim].
//
// If the session maps a GPU's memory, they may be device memory at multiples of 16 bytes, which
// must not change until the step's kernels have finished. They may also be host memory, which the
// step copies, with a wait per layer. Results are complete once End has returned, or in the order
// of StepOptions::cuda_stream.
struct StepTensors {
  std::span<const std::byte> key;    // kv heads
  std::span<const std::byte> value;  // kv heads
  std::span<const std::byte> query;  // query heads
  std::span<std::byte> output;       // query heads, in `output_type`
  std::span<float> lse;              // [batch][n][query heads], natural log; empty: not wanted
  ElementType output_type = ElementType::kFp32;  // or the model's
  bool causal = true;                            // a query sees its own position and earlier ones
  // What attention reads of segments that have block summaries. Unset: the sequence's policy
  // decides; a policy without a selection reads everything. A rate of 1 reads everything. All new
  // tokens of a sequence, at most kMaxSelectingTokens, share one selection. On a GPU, a rule that
  // differs from the previous call's costs an upload.
  std::optional<SelectionRule> selection;
};

inline constexpr std::uint32_t kMaxSelectingTokens = 256;  // the daemon's limit, too

// Used by one thread at a time; other steps, of other sequences, may run on other threads.
//
// Outputs of Attend are valid only once End has returned OK. ABORTED, from any call, means that the
// daemon revoked the step's pin or closed a tail: nothing was committed, and the caller repeats the
// step from BeginStep. UNAVAILABLE means that the lease is lost. All later calls repeat the status
// that ended a step early, so checking End is enough. A default-constructed or moved-from step
// answers INVALID_ARGUMENT.
class Step {
 public:
  Step() = default;
  Step(Step&& other) noexcept;
  Step& operator=(Step&& other) noexcept;
  ~Step() { Abandon(); }

  // Writes the new tokens' rows of one layer. Call it once per layer and step.
  absl::Status Append(std::uint32_t layer, std::span<const std::byte> key,
                      std::span<const std::byte> value);
  // Attends over the layer's entries, including the new tokens once they are appended. Query i of a
  // sequence belongs to its token `committed count + i`.
  absl::Status Attend(std::uint32_t layer, const StepTensors& tensors);
  // Append, then Attend.
  absl::Status AppendAndAttend(std::uint32_t layer, const StepTensors& tensors);

  // Commits the new tokens of every sequence, or the first `accepted[s]` of sequence s (speculative
  // decoding). FAILED_PRECONDITION if layers are missing, INVALID_ARGUMENT if a count does not fit:
  // the step then remains open. Any other result ends the step.
  absl::Status End() { return End({}); }
  absl::Status End(std::span<const std::uint32_t> accepted);

  // Ends the step with nothing committed. The destructor does the same.
  void Abandon();
  bool open() const;

 private:
  friend class Worker;
  explicit Step(std::shared_ptr<StepEngine> engine);
  absl::Status NotOpen(const char* call) const;
  absl::Status After(absl::Status status);

  std::shared_ptr<StepEngine> engine_;
  absl::Status ended_by_;
  bool began_ = false;  // false: default-constructed or moved from
};

}  // namespace tessera::client
