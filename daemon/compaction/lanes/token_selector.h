// `TokenSelector` makes a policy's choice for one layer of a sequence: it shows the lanes and the
// worker's observations to the policy, and returns what must be done with each lane.
//
// Needs no lock of the sequence: rows do not change while they are held. The caller holds the
// layer's mutex.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/cache/sequence/sequence.h"
#include "daemon/compaction/lanes/layer_choice.h"
#include "daemon/compaction/lanes/layer_state.h"
#include "daemon/compaction/lanes/uncommitted_step.h"
#include "daemon/policies/policy.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

class TokenSelector {
 public:
  struct Options {
    const cache::Sequence* sequence;
    const policies::Policy* policy;
    std::span<const policies::TextMark> text{};
    std::span<const policies::TokenSpan> prompts{};  // all other tokens were decoded
    // The worker has sent all of its observations. Otherwise those of the newest tokens may still
    // arrive, and the next choice covers these tokens.
    bool all_shown = false;
    // Triggered by decoded tokens: a prompt that is still arriving is skipped.
    bool decoding = false;
    // A caller waits for the choice, so it covers all tokens. Otherwise it ends at a stop.
    bool asked = false;
    // Null: all tokens are final.
    const UncommittedStep* open_step = nullptr;
  };
  TokenSelector(const Options& options, std::uint32_t layer);

  // The first token whose query norms are compared: the beginning of the first prompt that a choice
  // would cover, or of all tokens that it would cover if there is no prompt.
  absl::StatusOr<std::uint64_t> NormsFrom() const;
  // Whether rows before the stop are encoded before the choice is made.
  absl::StatusOr<bool> EncodesFirst(const LayerState& state) const;
  // The token at which the next choice ends, if there are more tokens.
  std::uint64_t Stop(const LayerState& state) const;
  // Chooses among the undecided rows, as at the end of a prompt. A policy that continues while
  // decoding chooses among all entries.
  absl::StatusOr<LayerChoice> Choose(const LayerState& state) const;
  // Keeps what was decoded after the last prompt, and what is left of that prompt. Covers no tokens
  // if that prompt has not been considered yet.
  absl::StatusOr<LayerChoice> KeepDecoded(const LayerState& state) const;
  // For policies that make one decision for all lanes: if some lanes have undecided rows at
  // positions where another lane has none, keeps those rows, so that the undecided rows are equal.
  // nullopt: they are equal. For policies that choose by prompt: keeps the rows before the next
  // one.
  absl::StatusOr<std::optional<LayerChoice>> Align(const LayerState& state) const;
  // Adopts the decision of another layer: keeps the tokens that it holds. FAILED_PRECONDITION: that
  // layer has not considered these tokens.
  absl::StatusOr<LayerChoice> TakeOver(std::uint32_t decides, const LayerState& theirs,
                                       const LayerState& state) const;
  // Adapts an unfinished choice to lanes that were truncated, so that the lanes of the layer become
  // alike again. ABORTED: the choice no longer fits.
  absl::Status Refit(LayerChoice& choice) const;

 private:
  struct Lanes;
  class Shown;
  struct Cuts {
    bool advances = false;  // by Advance, not Decide
    bool goes_on = false;   // there are tokens after the stop
    bool waits = false;     // for the tokens up to the stop
  };
  absl::StatusOr<Cuts> Cut(const LayerState& state, Lanes& lanes) const;
  const policies::TokenSpan* NextPrompt(const LayerState& state) const;
  absl::StatusOr<std::optional<LayerChoice>> AlignToPrompt(const LayerState& state) const;
  // The first token that a choice would cover; 0 if there are no rows.
  absl::StatusOr<std::uint64_t> Begin() const;
  absl::StatusOr<Lanes> Look(bool whole, bool keys) const;
  // A choice that covers the lanes, without decisions.
  static LayerChoice About(const Lanes& lanes, const LayerState& state);
  bool NeedsKeyChannels(const Lanes& lanes, const policies::LayerDecision& decision) const;
  bool LeavesAllOpen(const Lanes& lanes, const LayerChoice& choice) const;
  absl::Status ForgetBoundaries(const Lanes& lanes, LayerChoice& choice) const;
  bool NothingNew(const Lanes& lanes, const LayerState& state) const;
  absl::Status OfLayer(const absl::Status& why) const;
  std::uint64_t WholeSteps(std::uint64_t until, std::uint64_t end) const;
  std::uint64_t OpenPrompt(std::uint64_t end) const;
  absl::Status CheckShown(std::span<const policies::HeadQueries> queries, std::uint64_t until,
                          std::uint64_t end) const;

  const Options options_;
  const std::uint32_t layer_;
};

}  // namespace tessera::compaction
