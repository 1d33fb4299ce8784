// Carries out policies in the background: new tiles get the strategy before, runs that have come to
// their end get their own. README.md draws the way of a token.
//
//   Appended, TailsMoved, Compress ──▶ jobs: "encode-tiles" (some lanes of a sequence)
//                                            "seal" (one lane)
//                                            "choose-tokens" (layers that share a choice)
//
// Every job holds its sequence weakly: work for one that is gone is dropped.
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

class Compactor {
 public:
  struct Options {
    Scheduler* scheduler;
    Logger* logger;
    const Clock* clock;
    // For strategies, which are made on the host whatever the device.
    const kernels::Operations* operations;
    // Something is to be tried again: Resume says when.
    std::function<void()> on_attention = nullptr;
  };
  explicit Compactor(const Options& options) : options_(options) {}

  // The policy of a sequence from now on. What was compressed before stays as it is.
  // INVALID_ARGUMENT where the model cannot have it.
  absl::Status SetPolicy(cache::Sequence& sequence, policies::Policy policy);
  // A fork that goes on under its parent's policy, made by `fork`: between two choices, so that it
  // never has some lanes of a layer from before one and others from after it.
  using ForkFunction = absl::FunctionRef<absl::StatusOr<std::shared_ptr<cache::Sequence>>()>;
  absl::StatusOr<std::shared_ptr<cache::Sequence>> Fork(const cache::Sequence& parent,
                                                        ForkFunction fork);
  // Likewise a cut, which waits for choices that are being made.
  absl::Status Truncate(cache::Sequence& sequence, std::uint64_t tokens);
  // Has a sequence take over the segments of another under the same policy that holds the same
  // tokens, or the first of them: of a prefix, where nothing is done any more. ABORTED while it is
  // being compressed.
  absl::Status AdoptPrefix(cache::Sequence& sequence, const cache::Sequence& other);
  static policies::Policy PolicyOf(const cache::Sequence& sequence);
  // The tokens that every layer has chosen among, of policies that choose.
  static std::uint64_t DecidedOf(const cache::Sequence& sequence);
  // Likewise of each layer; empty where the policy chooses nothing.
  static std::vector<std::uint64_t> DecidedByLayer(const cache::Sequence& sequence);
  // What is lost of rows of a lane that wait for a strategy: in the mean, of the newest.
  static kernels::Loss LossOf(const cache::Sequence& sequence, std::uint32_t lane);
  // What its policy has made of its lanes, in their order: those of `lanes`, which describe it.
  static std::vector<LaneOutcome> OutcomesOf(
      const cache::Sequence& sequence, std::span<const cache::Sequence::LaneDescription> lanes);
  // What its attention reads of a layer where a call does not say; nothing: everything.
  static std::optional<kernels::SelectionRule> SelectionOf(const cache::Sequence& sequence,
                                                           std::uint32_t layer);

  // Rows that come in by Append.
  struct Rows {
    std::uint32_t first_layer = 0;
    std::uint32_t layers = 0;
    bool end_of_prompt = false;
    bool decoded = false;
    std::uint64_t first_token = 0;
    std::uint64_t until = 0;                        // tokens that these layers hold then
    std::optional<std::uint64_t> position_shift{};  // of Append: AppendSpan
    // Of Compress: the worker has shown what it will. What a policy misses then is an error; else
    // what has not been shown yet is decided about another time.
    bool all_shown = false;
    // Of Compress: the worker does not wait for it. What a step has appended may be taken back, and
    // does not count.
    bool amid_steps = false;
  };
  // As Sequence::Append; that they are a prompt is known before anybody can see them.
  absl::StatusOr<std::uint64_t> Append(const std::shared_ptr<cache::Sequence>& sequence,
                                       const Rows& rows, const cache::RowSource& source);
  void Appended(const std::shared_ptr<cache::Sequence>& sequence, const Rows& rows);
  // The prompt of these layers has ended with what they hold: as an Append with end_of_prompt.
  absl::Status EndPrompt(const std::shared_ptr<cache::Sequence>& sequence,
                         std::uint32_t first_layer, std::uint32_t layers);
  // Full tiles moved from the tail into segments.
  void TailsMoved(const std::shared_ptr<cache::Sequence>& sequence);

  // Compresses what there is, as at the end of a prompt, and calls `done` from the last job, or
  // here where there is nothing to do: OK, or the first thing that went wrong. CANCELLED where the
  // sequence is freed, or the scheduler ends, before all of it is done.
  using Done = absl::AnyInvocable<void(absl::Status) &&>;
  void Compress(const std::shared_ptr<cache::Sequence>& sequence, const Rows& rows, Done done);

  // What a worker shows of one layer, for the sequence's policy to decide by. Kept until that layer
  // is compressed. FAILED_PRECONDITION where the policy asks for nothing.
  absl::Status Observe(cache::Sequence& sequence, const ObservedLayer& shown);
  // Of a layer's tokens from this one on the queries of largest norm count by now.
  absl::StatusOr<std::uint64_t> NormsFrom(const cache::Sequence& sequence,
                                          std::uint32_t layer) const;
  // The ids of tokens from `first_token` on. The same.
  absl::Status ObserveTokens(cache::Sequence& sequence, std::uint64_t first_token,
                             std::span<const std::uint32_t> ids);

  // Gains about so many bytes of the pool, where the sequence's policy allows it, from rows that
  // keep fewer channels from now on (`pressed`); readers go on meanwhile. What it holds is then not
  // its policy's doing any more. No error means that there is nothing to be had: RESOURCE_EXHAUSTED
  // where a lane's new form has no room beside the old one.
  struct ReduceOutcome {
    ReducedBytes gained;
    bool allowed = false;    // by its policy
    absl::Status hindrance;  // why it was not more; OK: there is no more, or it is enough
  };
  ReduceOutcome Thin(cache::Sequence& sequence, std::uint64_t bytes);

  // Tries again, in jobs, what found no memory and has waited long enough; how long until the next
  // look. Nothing: until on_attention.
  std::optional<Clock::Duration> Resume();

  const CodingCounters& counters() const { return counters_; }

 private:
  class Batch;
  class Ticket;
  class Turn;

  struct TileJob {
    std::uint32_t first = 0;  // lane
    std::uint32_t end = 0;
    bool all = false;  // what WantTiles asked for
    // Where somebody waits: the policy that he asked under.
    std::weak_ptr<const ManagedSequence> waiter_policy = {};
  };
  // compactor_join.cc: one after another, here and now. ABORTED where somebody else is at a lane.
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
  // Of policies that choose and pack: what was decoded behind their choices gets strategies of its
  // own, all lanes of the layer alike.
  void QueueKeepDecoded(const std::shared_ptr<cache::Sequence>& sequence,
                        const std::shared_ptr<ManagedSequence>& managed, std::uint32_t layer);
  absl::Status EncodeBefore(const std::shared_ptr<cache::Sequence>& sequence,
                            ManagedSequence& managed, std::uint32_t layer);
  struct AskedLayer {
    std::uint32_t index;
    bool all_shown;              // Rows::all_shown
    bool amid_steps;             // Rows::amid_steps
    bool decoding;               // asked for by tokens that were decoded
    bool keeps_decoded = false;  // TokenSelector::KeepDecoded
  };
  absl::Status Choose(cache::Sequence& sequence, ManagedSequence& managed, AskedLayer asked);
  // What is chosen now; ChoiceOf also measures the time that it takes.
  absl::StatusOr<LayerChoice> Choice(const cache::Sequence& sequence, ManagedSequence& managed,
                                     AskedLayer asked, const LayerState& state);
  absl::StatusOr<LayerChoice> ChoiceOf(const cache::Sequence& sequence, ManagedSequence& managed,
                                       AskedLayer asked, const LayerState& state);
  absl::Status Refit(const cache::Sequence& sequence, ManagedSequence& managed, std::uint32_t layer,
                     LayerChoice& choice);
  absl::Status CarryOut(cache::Sequence& sequence, ManagedSequence& managed, std::uint32_t layer,
                        LayerChoice& choice);

  struct SealJob {
    std::uint32_t lane = 0;
    // What somebody waits for, where it stands, and the policy that he asked for it under;
    // 0: whatever is wanted of the lane.
    SealRequests::Told told = 0;
    std::shared_ptr<LaneWork> waiter_lane = nullptr;
    std::weak_ptr<const ManagedSequence> waiter_policy = {};
    bool again = false;            // it comes from the line of those that found no memory
    bool is_continuation = false;  // with what another has begun
  };
  void QueueSeal(const std::shared_ptr<cache::Sequence>& sequence, const SealJob& job,
                 Ticket ticket);
  // At most one job waits for each lane.
  void RequestSeal(const std::shared_ptr<cache::Sequence>& sequence, ManagedSequence& managed,
                   std::uint32_t lane, const SealRequest& wish);
  // Of lanes whose prompt ends with these rows: those that no job waits for, and that are to get
  // one.
  static std::vector<std::uint32_t> RequestPromptEnd(ManagedSequence& managed,
                                                     const cache::Model& model, const Rows& rows);
  void QueueDeferred(std::optional<DeferredSeals::Item> item);
  // Those that met somebody at their lane, or a sequence that had been moved out.
  void QueueDeferredOf(const std::shared_ptr<cache::Sequence>& sequence, ManagedSequence& managed);
  // `waits`: until nobody works on the lane. Else a lane where somebody does is left to them.
  absl::Status EncodeTiles(const std::shared_ptr<cache::Sequence>& sequence, std::uint32_t lane,
                           bool waits);
  struct TilesOutcome {
    std::uint32_t layer = 0;
    bool left = false;  // to a seal that is in hand
    bool more = false;  // are there
    std::optional<SealRequest> wants_seal;
  };
  absl::Status EncodeTilesOf(cache::Sequence& sequence, ManagedSequence& managed,
                             std::uint32_t lane, LaneState& state, TilesOutcome& outcome);
  // Whoever has worked on a lane has let go of it.
  void OnLaneReleased(const std::shared_ptr<cache::Sequence>& sequence, ManagedSequence& managed,
                      std::uint32_t lane);
  // Where nobody is told how it went, what finds no memory comes again.
  // `is_continuation`: there is more to do, and another job is to do it.
  absl::Status SealOrStall(const std::shared_ptr<cache::Sequence>& sequence, const SealJob& job,
                           Turn& turn, bool& is_continuation);
  // What the lane's jobs are to do, or a part of it. A long one would keep tails waiting where
  // there is one thread, and other sequences in any case. Nothing: another policy has been set.
  std::optional<absl::Status> Seal(cache::Sequence& sequence, ManagedSequence& managed,
                                   std::uint32_t lane, bool& is_continuation);
  LaneCoder::Options CoderOptions(const cache::Sequence& sequence, ManagedSequence& managed,
                                  LaneState& state);
  absl::StatusOr<std::shared_ptr<cache::Sequence>> ForkPaused(ManagedSequence& managed,
                                                              const ManagedSequence::Pause& pause,
                                                              const cache::Model& model,
                                                              ForkFunction fork);
  // `end_wanted`: the seals of a prompt's end are wanted already.
  void AfterAppend(const std::shared_ptr<cache::Sequence>& sequence,
                   const std::shared_ptr<ManagedSequence>& managed, const Rows& rows,
                   bool end_wanted);
  static absl::Status CheckAdoptable(const cache::Sequence& sequence, const cache::Sequence& other);
  // Of one without a policy, when it was asked.
  static absl::Status TruncateUnmanaged(cache::Sequence& sequence, std::uint64_t tokens);
  absl::StatusOr<ReducedBytes> ReduceLane(cache::Sequence& sequence, ManagedSequence& managed,
                                          std::uint32_t index, std::uint64_t bytes);
  // While no job of the policy before is at any lane; null: there is none.
  absl::Status ReplacePolicy(cache::Sequence& sequence, ManagedSequence* before,
                             policies::Policy policy);
  void WarnOfSmallBudget(const cache::Sequence& sequence, const policies::Policy& policy);
  void WarnOfShortSegments(const cache::Sequence& sequence, const policies::Policy& policy);
  // Keeps, and counts for so many lanes, what an attempt has left dense.
  void Note(DenseRecord& record, DenseRows rows, std::uint32_t lanes);
  void Complain(const cache::Sequence& sequence, std::string_view what, const absl::Status& why);

  const Options options_;
  CodingCounters counters_;
  // A worker decides how often a full pool is met: complaints are kept to one a second.
  LogRateLimit complaints_;
  LogRateLimit small_budgets_{std::chrono::minutes(1)};
  LogRateLimit short_segments_{std::chrono::minutes(1)};
  DeferredSeals stalled_;
};

}  // namespace tessera::compaction
