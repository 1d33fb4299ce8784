// `Compactor` compresses sequences in the background. A full tile is encoded with the previous
// segment's strategy; a sealed segment gets its own strategy. README.md shows the life of a token.
//
//   Appended, TailsMoved, Compress ──▶ jobs: "encode-tiles" (some lanes of a sequence)
//                                            "seal" (one lane)
//                                            "choose-tokens" (layers that share a decision)
//
// Jobs hold their sequence weakly: work for a freed sequence is dropped.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/mutex.h"
#include "daemon/base/rate_limit.h"
#include "daemon/base/scheduler.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/compaction/jobs/deferred_seals.h"
#include "daemon/compaction/jobs/managed_sequence.h"
#include "daemon/compaction/lanes/channel_reducer.h"

namespace tessera::compaction {

// Thread-safe. The daemon owns one; it must outlive the scheduler's jobs. Work that fails leaves
// the rows as they are and is logged, unless a caller of Compress waits for the result.
class Compactor {
 public:
  struct Options {
    Scheduler* scheduler;
    Logger* logger;
    const Clock* clock;
    // Kernels for strategies, which are always computed on the host.
    const kernels::Operations* operations;
    // Called when a job must be retried; Resume() returns the time until the next attempt.
    std::function<void()> on_attention = nullptr;
  };
  explicit Compactor(const Options& options) : options_(options) {}

  // Sets the policy of a sequence. Rows that are already compressed keep their form.
  // INVALID_ARGUMENT: the model does not support the policy.
  absl::Status SetPolicy(cache::Sequence& sequence, policies::Policy policy);
  // Calls `fork` and gives the new sequence its parent's policy. Waits for running decisions, so
  // that all lanes of a layer are from before or from after a decision.
  using ForkFunction = absl::FunctionRef<absl::StatusOr<std::shared_ptr<cache::Sequence>>()>;
  absl::StatusOr<std::shared_ptr<cache::Sequence>> Fork(const cache::Sequence& parent,
                                                        ForkFunction fork);
  // Truncates the sequence to `tokens`. Waits for running decisions.
  absl::Status Truncate(cache::Sequence& sequence, std::uint64_t tokens);
  // Replaces the sequence's segments by those of `other`, which is a published prefix with the same
  // policy and the sequence's tokens, or the first of them. ABORTED: the sequence is being
  // compressed.
  absl::Status AdoptPrefix(cache::Sequence& sequence, const cache::Sequence& other);
  static policies::Policy PolicyOf(const cache::Sequence& sequence);
  // The tokens that every layer has decided about, for policies that choose.
  static std::uint64_t DecidedOf(const cache::Sequence& sequence);
  // The same by layer; empty if the policy chooses nothing.
  static std::vector<std::uint64_t> DecidedByLayer(const cache::Sequence& sequence);
  // The mean loss of the newest rows of a lane that wait for their own strategy.
  static kernels::Loss LossOf(const cache::Sequence& sequence, std::uint32_t lane);
  // The outcome of compression for each of `lanes`, which describe the sequence.
  static std::vector<LaneOutcome> OutcomesOf(
      const cache::Sequence& sequence, std::span<const cache::Sequence::LaneDescription> lanes);
  // The default selection rule of a layer; nullopt: attention reads every entry.
  static std::optional<kernels::SelectionRule> SelectionOf(const cache::Sequence& sequence,
                                                           std::uint32_t layer);

  // Rows that were appended, or that Compress is about.
  struct Rows {
    std::uint32_t first_layer = 0;
    std::uint32_t layers = 0;
    bool end_of_prompt = false;
    bool decoded = false;
    std::uint64_t first_token = 0;
    std::uint64_t until = 0;                        // tokens that these layers hold with the rows
    std::optional<std::uint64_t> position_shift{};  // Append only: see AppendSpan
    // Compress only: the worker has sent all of its observations, so a missing one is an error.
    // Otherwise tokens with missing observations are left for a later decision.
    bool all_shown = false;
    // Compress only: the worker may be in a step, whose tokens may be taken back and do not count.
    bool amid_steps = false;
  };
  // Calls Sequence::Append. Whether the rows are a prompt is recorded before they become visible.
  absl::StatusOr<std::uint64_t> Append(const std::shared_ptr<cache::Sequence>& sequence,
                                       const Rows& rows, const cache::RowSource& source);
  void Appended(const std::shared_ptr<cache::Sequence>& sequence, const Rows& rows);
  // Ends the prompt of these layers at the tokens that they hold, like Append with end_of_prompt.
  absl::Status EndPrompt(const std::shared_ptr<cache::Sequence>& sequence,
                         std::uint32_t first_layer, std::uint32_t layers);
  // Called after full tiles have moved from tails into segments.
  void TailsMoved(const std::shared_ptr<cache::Sequence>& sequence);

  // Compresses all rows, as at the end of a prompt. Calls `done` with OK or the first error: from
  // the last job, or from this call if there is nothing to do. CANCELLED: the sequence was freed,
  // or the scheduler stopped, before all jobs were done.
  using Done = absl::AnyInvocable<void(absl::Status) &&>;
  void Compress(const std::shared_ptr<cache::Sequence>& sequence, const Rows& rows, Done done);

  // Takes a worker's observation of one layer, for the policy's next decision. It is kept until
  // that layer is compressed. FAILED_PRECONDITION: the policy needs no observations.
  absl::Status Observe(cache::Sequence& sequence, const ObservedLayer& shown);
  // The first token of a layer whose queries compete for the largest norms at the moment.
  absl::StatusOr<std::uint64_t> NormsFrom(const cache::Sequence& sequence,
                                          std::uint32_t layer) const;
  // Takes the ids of tokens from `first_token` on. FAILED_PRECONDITION: the policy needs none.
  absl::Status ObserveTokens(cache::Sequence& sequence, std::uint64_t first_token,
                             std::span<const std::uint32_t> ids);

  // Frees about `bytes` of the pool by re-encoding the sequence's rows with fewer channels or bits,
  // if its policy allows it (`pressed`). Readers are not blocked. The content is then no longer
  // what the policy describes. RESOURCE_EXHAUSTED: a lane's new form does not fit beside the old
  // one.
  struct ReduceOutcome {
    ReducedBytes gained;
    bool allowed = false;    // by the policy
    absl::Status hindrance;  // why no more was freed; OK: nothing is left to free, or it is enough
  };
  ReduceOutcome Thin(cache::Sequence& sequence, std::uint64_t bytes);

  // Queues deferred seals whose wait for memory has ended. Returns the time until the next attempt;
  // nullopt: wait for on_attention.
  std::optional<Clock::Duration> Resume();

  const CodingCounters& counters() const { return counters_; }

 private:
  class Batch;
  class Ticket;
  class Turn;

  struct TileJob {
    std::uint32_t first = 0;  // lane
    std::uint32_t end = 0;
    bool all = false;  // requested by WantTiles
    // If a caller waits: the policy under which it called.
    std::weak_ptr<const ManagedSequence> waiter_policy = {};
  };
  // compactor_join.cc: joins one lane after another, synchronously. ABORTED: another thread works
  // on a lane.
  absl::Status JoinCrowdedLanes(const std::shared_ptr<cache::Sequence>& sequence);
  absl::Status JoinSome(const std::shared_ptr<cache::Sequence>& sequence, std::uint32_t lane,
                        bool& joined);
  // compactor_tiles.cc
  void QueueTiles(const std::shared_ptr<cache::Sequence>& sequence, TileJob job, Ticket ticket);
  // compactor_tokens.cc
  void QueueChoices(const std::shared_ptr<cache::Sequence>& sequence,
                    const std::shared_ptr<ManagedSequence>& managed, const Rows& rows,
                    JobPriority priority, const std::shared_ptr<Batch>& batch);
  void QueueChoice(const std::shared_ptr<cache::Sequence>& sequence,
                   const std::shared_ptr<ManagedSequence>& managed,
                   std::vector<std::uint32_t> layers, JobPriority priority, Ticket ticket);
  // For policies that choose and pack: gives tokens decoded after the last decision their own
  // strategies, in all lanes of the layer alike.
  void QueueKeepDecoded(const std::shared_ptr<cache::Sequence>& sequence,
                        const std::shared_ptr<ManagedSequence>& managed, std::uint32_t layer);
  // Encodes the rows that a choice has to find encoded. The caller holds the layer's mutex.
  absl::Status EncodeBefore(cache::Sequence& sequence, const TokenSelector& chooser,
                            std::uint32_t layer, const LayerState& state);
  // Carries out what background jobs would do for the layer, for a caller who waits.
  absl::Status Tidy(cache::Sequence& sequence, ManagedSequence& managed, std::uint32_t layer);
  // Dense rows of a lane that arrived at different times become one segment, so that
  // attention sums in the same order whenever background jobs have run.
  absl::Status JoinPlain(cache::Sequence& sequence, ManagedSequence& managed, std::uint32_t lane);
  struct AskedLayer {
    std::uint32_t index;
    bool all_shown;              // Rows::all_shown
    bool amid_steps;             // Rows::amid_steps
    bool decoding;               // triggered by decoded tokens
    bool asked = false;          // a caller waits
    bool keeps_decoded = false;  // TokenSelector::KeepDecoded
  };
  absl::Status Choose(cache::Sequence& sequence, ManagedSequence& managed, AskedLayer asked);
  // The next choice for the layer; ChoiceOf also measures the time it takes.
  absl::StatusOr<LayerChoice> Choice(cache::Sequence& sequence, ManagedSequence& managed,
                                     AskedLayer asked, const LayerState& state);
  absl::StatusOr<LayerChoice> ChoiceBy(const TokenSelector& chooser, cache::Sequence& sequence,
                                       ManagedSequence& managed, AskedLayer asked,
                                       const LayerState& state);
  absl::StatusOr<LayerChoice> ChoiceOf(cache::Sequence& sequence, ManagedSequence& managed,
                                       AskedLayer asked, const LayerState& state);
  absl::Status Refit(const cache::Sequence& sequence, ManagedSequence& managed, std::uint32_t layer,
                     LayerChoice& choice);
  absl::Status CarryOut(cache::Sequence& sequence, ManagedSequence& managed, std::uint32_t layer,
                        LayerChoice& choice);

  struct SealJob {
    std::uint32_t lane = 0;
    // If a caller waits: its request, the lane's work and the policy at the time of the call.
    // 0: the job carries out all requests of the lane.
    SealRequests::Told told = 0;
    std::shared_ptr<LaneWork> waiter_lane = nullptr;
    std::weak_ptr<const ManagedSequence> waiter_policy = {};
    bool again = false;            // a retry from the queue of seals that found no memory
    bool is_continuation = false;  // continues what an earlier job has begun
  };
  void QueueSeal(const std::shared_ptr<cache::Sequence>& sequence, const SealJob& job,
                 Ticket ticket);
  // Queues at most one job per lane.
  void RequestSeal(const std::shared_ptr<cache::Sequence>& sequence, ManagedSequence& managed,
                   std::uint32_t lane, const SealRequest& wish);
  // Requests seals for the lanes whose prompt ends with these rows. Returns the lanes that have no
  // queued job yet.
  static std::vector<std::uint32_t> RequestPromptEnd(ManagedSequence& managed,
                                                     const cache::Model& model, const Rows& rows);
  void QueueDeferred(std::optional<DeferredSeals::Item> item);
  // Queues the sequence's seals that found their lane busy or the sequence offloaded.
  void QueueDeferredOf(const std::shared_ptr<cache::Sequence>& sequence, ManagedSequence& managed);
  // `waits`: waits for a busy lane. Otherwise the job that works on the lane takes over the tiles.
  // `for_choice`: encodes rows up to the stop of the next choice, whose job holds the layer.
  absl::Status EncodeTiles(const std::shared_ptr<cache::Sequence>& sequence, std::uint32_t lane,
                           bool waits, bool for_choice = false);
  struct TilesOutcome {
    std::uint32_t layer = 0;
    bool left = false;  // the tiles are left to a seal that is queued or running
    bool more = false;  // there are more tiles
    std::optional<SealRequest> wants_seal;
  };
  absl::Status EncodeTilesOf(cache::Sequence& sequence, ManagedSequence& managed,
                             std::uint32_t lane, LaneState& state, bool for_choice,
                             TilesOutcome& outcome);
  // Called after a job has released a lane: queues the work that was left to that job.
  void OnLaneReleased(const std::shared_ptr<cache::Sequence>& sequence, ManagedSequence& managed,
                      std::uint32_t lane);
  // Runs a seal. If no caller waits and there is no memory, the seal is deferred.
  // `is_continuation`: there is more to do, in another job.
  absl::Status SealOrStall(const std::shared_ptr<cache::Sequence>& sequence, const SealJob& job,
                           Turn& turn, bool& is_continuation);
  // Carries out the lane's running requests, or a part of them, so that tails and other sequences
  // do not wait for a long seal. nullopt: another policy has been set.
  std::optional<absl::Status> Seal(cache::Sequence& sequence, ManagedSequence& managed,
                                   std::uint32_t lane, bool& is_continuation);
  // Counts what Recode replaces under the policy; null: the policy re-encodes nothing.
  cache::ReplacedBytes* CounterOf(const policies::Policy& policy);
  LaneCoder::Options CoderOptions(const cache::Sequence& sequence, ManagedSequence& managed,
                                  LaneState& state);
  absl::StatusOr<std::shared_ptr<cache::Sequence>> ForkPaused(ManagedSequence& managed,
                                                              const ManagedSequence::Pause& pause,
                                                              const cache::Model& model,
                                                              ForkFunction fork);
  // `end_wanted`: the seals for the end of the prompt have been requested already.
  void AfterAppend(const std::shared_ptr<cache::Sequence>& sequence,
                   const std::shared_ptr<ManagedSequence>& managed, const Rows& rows,
                   bool end_wanted);
  static absl::Status CheckAdoptable(const cache::Sequence& sequence, const cache::Sequence& other);
  // Truncates a sequence that had no policy when Truncate was called.
  static absl::Status TruncateUnmanaged(cache::Sequence& sequence, std::uint64_t tokens);
  absl::StatusOr<ReducedBytes> ReduceLane(cache::Sequence& sequence, ManagedSequence& managed,
                                          std::uint32_t index, std::uint64_t bytes);
  // Replaces the policy while no job works on any lane. `before` may be null.
  absl::Status ReplacePolicy(cache::Sequence& sequence, ManagedSequence* before,
                             policies::Policy policy);
  void WarnOfSmallBudget(const cache::Sequence& sequence, const policies::Policy& policy);
  void WarnOfShortSegments(const cache::Sequence& sequence, const policies::Policy& policy);
  // Records what an attempt has left dense, and counts it for `lanes` lanes.
  void Note(DenseRecord& record, DenseRows rows, std::uint32_t lanes);
  void Complain(const cache::Sequence& sequence, std::string_view what, const absl::Status& why);

  const Options options_;
  CodingCounters counters_;
  // A worker can cause failures at any rate, so they are logged at most once a second.
  LogRateLimit complaints_;
  LogRateLimit small_budgets_{std::chrono::minutes(1)};
  LogRateLimit short_segments_{std::chrono::minutes(1)};
  DeferredSeals stalled_;
};

}  // namespace tessera::compaction
