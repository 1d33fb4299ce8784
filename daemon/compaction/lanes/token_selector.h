// What a policy chooses for one layer of a sequence: looks at its lanes, shows them to the policy
// with what the worker has shown, and says what is to become of each.
//
// Without a lock of the sequence: rows that are looked at stay as they are while they are held.
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
    std::span<const policies::TokenSpan> prompts{};  // the other tokens were decoded
    // The worker has shown what it will. Otherwise what the newest tokens need may be on its way,
    // and the next choice is about them.
    bool all_shown = false;
    // Asked for by tokens that were decoded: a prompt that still comes is left alone.
    bool decoding = false;
    // Null: no step is open, or all that there is counts, whoever asks for it.
    const UncommittedStep* open_step = nullptr;
  };
  TokenSelector(const Options& options, std::uint32_t layer);

  // Queries by norm count from this token on: of the first prompt that a choice would look at, or,
  // where there is none, of all that it would look at.
  absl::StatusOr<std::uint64_t> NormsFrom() const;
  // About what waits in the lanes, as at the end of a prompt. A policy that continues, and has
  // begun, goes on over all of the lanes.
  absl::StatusOr<LayerChoice> Choose(const LayerState& state) const;
  // That what was decoded behind the last prompt stays, and what was left of that with it; nothing
  // where it has not been looked at.
  absl::StatusOr<LayerChoice> KeepDecoded(const LayerState& state) const;
  // Where one decision is made for all lanes of a layer, and some have rows that wait where another
  // has none any more: that those stay, so that what waits is alike. Nothing: it is.
  absl::StatusOr<std::optional<LayerChoice>> Align(const LayerState& state) const;
  // What another layer has left of the same tokens. FAILED_PRECONDITION where that has not looked
  // at them.
  absl::StatusOr<LayerChoice> TakeOver(std::uint32_t decides, const LayerState& theirs,
                                       const LayerState& state) const;
  // Makes a choice that was cut fit the lanes where it has not been carried out: the layer's lanes
  // are to be alike again.
  absl::Status Refit(LayerChoice& choice) const;

 private:
  struct Lanes;
  class Shown;
  // The first token that a choice would look at; 0: there is none, or all are.
  absl::StatusOr<std::uint64_t> Begin() const;
  absl::StatusOr<Lanes> Look(bool whole, bool keys) const;
  // A choice about what is seen, before it has been made.
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
