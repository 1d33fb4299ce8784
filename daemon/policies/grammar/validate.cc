#include "daemon/policies/grammar/validate.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "daemon/base/strings.h"
#include "daemon/policies/plan.h"
#include "daemon/policies/token_system.h"
#include "proto/shm/layout.h"

namespace tessera::policies {
namespace {

using kernels::Summary;

constexpr std::uint32_t kLargestHeadDim = 256;
static_assert(kernels::IsHeadDim(kLargestHeadDim) && !kernels::IsHeadDim(2 * kLargestHeadDim));
constexpr std::uint32_t kLargestGroup = 4;
static_assert(kernels::IsGroup(kLargestGroup) && !kernels::IsGroup(2 * kLargestGroup));

template <typename... Parts>
absl::Status Refuse(const Parts&... why) {
  return absl::InvalidArgumentError(Concat("policy: ", why...));
}

template <typename... Parts>
absl::Status RefuseAt(const Term& term, const Parts&... why) {
  return absl::InvalidArgumentError(Concat("policy, character ", term.at, ": ", why...));
}

absl::Status CheckPair(const Term& earlier, const Term& later) {
  const TermKind& one = *earlier.kind;
  const TermKind& other = *later.kind;
  if (&one == &other) return RefuseAt(later, other.name, " is given twice");
  if (one.decides == other.decides) {
    return RefuseAt(later, one.name, " and ", other.name, " both decide ",
                    DecidesText(one.decides));
  }
  return absl::OkStatus();
}

// Checks a term against all others, whatever their order.
absl::Status CheckAmong(const Term& term, std::span<const Term> all) {
  const TermKind& kind = *term.kind;
  const bool packing = std::ranges::any_of(
      all, [](const Term& other) { return other.kind->decides == Decides::kPacking; });
  if (kind.decides == Decides::kValues && !packing) {
    return RefuseAt(term, kind.name,
                    " is a type of packed values, but no term packs rows; add mosaickv or think");
  }
  if (kind.decides == Decides::kNothing && all.size() > 1) {
    return RefuseAt(term, kind.name,
                    " cannot be combined with other terms: it means no compression");
  }
  if (kind.check == nullptr) return absl::OkStatus();
  const std::string why = kind.check(term, all);
  return why.empty() ? absl::OkStatus() : RefuseAt(term, kind.name, ": ", why);
}

// Checks that every share is at least one group in rows of this length. Channels are rounded down
// as strategies do it, with a tolerance for rounding errors.
absl::Status CheckGroups(const kernels::StrategyOptions& strategy, std::uint32_t head_dim) {
  const auto count_down = [head_dim](double share) {
    return static_cast<std::uint32_t>(std::floor(share * head_dim + 1e-6));
  };
  for (const double kept : strategy.kept) {
    const std::uint32_t channels = count_down(kept);
    for (const std::uint32_t group : strategy.groups) {
      if (channels >= group) continue;
      return Refuse("mosaickv: keep ", kept, " of head_dim ", head_dim, " is ", channels,
                    " channels, less than a group of ", group);
    }
  }
  if (count_down(1 - strategy.truncated) >= kLargestGroup) return absl::OkStatus();
  return Refuse("mosaickv: truncate ", strategy.truncated, " leaves less than ", kLargestGroup,
                " channels of head_dim ", head_dim);
}

absl::Status CheckShares(const kernels::StrategyOptions& strategy) {
  if (strategy.kept.empty()) return Refuse("mosaickv: keep is empty");
  if (strategy.groups.empty()) return Refuse("mosaickv: group is empty");
  if (!(strategy.truncated >= 0 && strategy.truncated < 1)) {
    return Refuse("mosaickv: truncate is ", strategy.truncated,
                  "; it must be at least 0 and less than 1");
  }
  constexpr double kRounding = 1e-9;
  for (const double kept : strategy.kept) {
    if (!(kept > 0 && kept <= 1)) {
      return Refuse("mosaickv: keep has ", kept, "; each value must be above 0 and at most 1");
    }
    if (kept > 1 - strategy.truncated + kRounding) {
      return Refuse("mosaickv: keep ", kept, " is more than truncate ", strategy.truncated,
                    " leaves, ", 1 - strategy.truncated);
    }
  }
  if (strategy.blocks.empty() != (strategy.summary == Summary::kNone)) {
    return Refuse("mosaickv: block has ", strategy.blocks.size(), " sizes, but blocks have ",
                  strategy.summary == Summary::kNone ? "no " : "", "summaries");
  }
  for (const std::uint32_t block : strategy.blocks) {
    if (!kernels::IsBlock(block)) return Refuse("mosaickv: block ", block, " is not 4, 8 or 16");
  }
  for (const std::uint32_t group : strategy.groups) {
    if (!kernels::IsGroup(group)) return Refuse("mosaickv: group ", group, " is not 1, 2 or 4");
  }
  // Shares that are too small for the longest rows are too small for all.
  return CheckGroups(strategy, kLargestHeadDim);
}

absl::Status CheckPressed(const MosaicPolicy& mosaic) {
  if (mosaic.pressed == 0) return absl::OkStatus();
  if (!(mosaic.pressed > 0 && mosaic.pressed <= 1)) {
    return Refuse("mosaickv: pressed is ", mosaic.pressed, "; it must be 0 to 1");
  }
  const double most = *std::max_element(mosaic.strategy.kept.begin(), mosaic.strategy.kept.end());
  if (mosaic.pressed <= most) return absl::OkStatus();
  return Refuse("mosaickv: pressed ", mosaic.pressed, " is more than the largest keep, ", most,
                ", so it would free no memory");
}

absl::Status CheckSegments(const SegmentOptions& segments) {
  if (segments.tokens == 0 || segments.tokens > shm::kMaxSegmentEntries) {
    return Refuse("mosaickv: segment ", segments.tokens, " is not 1 to ", shm::kMaxSegmentEntries);
  }
  if (segments.min_tokens > segments.tokens) {
    return Refuse("mosaickv: min_segment ", segments.min_tokens, " is more than segment ",
                  segments.tokens);
  }
  if (segments.loss_window == 0) return Refuse("mosaickv: window is 0; it must be at least 1");
  return absl::OkStatus();
}

absl::Status CheckKeyChannels(const KeyChannelPolicy& policy) {
  if (!(policy.ratio > 0 && policy.ratio < 1)) {
    return Refuse("think: ratio is ", policy.ratio, "; it must be above 0 and below 1");
  }
  if (policy.window == 0) return Refuse("think: window is 0; it must be at least 1");
  return absl::OkStatus();
}

// Checks that at least one channel is dropped, and that the tile format supports the result.
absl::Status CheckKeyChannelsFor(const KeyChannelPolicy& policy,
                                 const kernels::LayerGeometry& geometry) {
  if (KeptKeyChannels(policy, geometry.head_dim) == geometry.head_dim) {
    return Refuse("think: ratio ", policy.ratio, " of head_dim ", geometry.head_dim,
                  " is less than one channel");
  }
  if (geometry.type == kernels::ElementType::kFp32 && !policy.values.has_value()) {
    return Refuse("think: fp32 rows cannot be packed as fp32; name a value type, as in think+bf16");
  }
  const char* why = kernels::UnsupportedReason(KeyChannelShape(policy, geometry));
  return why == nullptr ? absl::OkStatus() : Refuse("think: ", why);
}

absl::Status CheckSelection(const Policy& policy) {
  const kernels::SelectionRule& rule = policy.selection->rule;
  if (rule.entries == 0 && !(rule.rate > 0 && rule.rate <= 1)) {
    return Refuse("the selection's rate is ", rule.rate, "; it must be above 0 and at most 1");
  }
  if (rule.entries != 0 && rule.floor != 0) {
    return Refuse("the selection has entries ", rule.entries, " and floor ", rule.floor,
                  "; floor applies only to a budget by rate");
  }
  if (policy.mosaic.has_value() && policy.mosaic->strategy.summary == Summary::kNone) {
    return Refuse("the policy has a selection, but packed rows have no block summaries");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTogether(std::span<const Term> terms) {
  for (const Term& later : terms) {
    for (const Term& earlier : terms.first(static_cast<std::size_t>(&later - terms.data()))) {
      if (absl::Status status = CheckPair(earlier, later); !status.ok()) return status;
    }
  }
  for (const Term& term : terms) {
    if (absl::Status status = CheckAmong(term, terms); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Validate(const Policy& policy) {
  if (policy.mosaic.has_value()) {
    if (policy.summaries.has_value()) {
      return Refuse("the policy packs rows, and also summarizes unpacked rows");
    }
    absl::Status status = CheckShares(policy.mosaic->strategy);
    if (status.ok()) status = CheckSegments(policy.mosaic->segments);
    if (status.ok()) status = CheckPressed(*policy.mosaic);
    if (!status.ok()) return status;
  }
  if (policy.planes.has_value() && (policy.mosaic.has_value() || policy.summaries.has_value() ||
                                    policy.key_channels.has_value())) {
    return Refuse("the policy stores rows in planes, and also in another form");
  }
  if (policy.signs) {
    if (policy.mosaic.has_value() || policy.key_channels.has_value() ||
        policy.summaries.has_value()) {
      return Refuse("the policy indexes keys by signs, and also packs or summarizes rows");
    }
    if (!policy.selection.has_value()) return Refuse("the policy has signs without a selection");
  }
  if (policy.key_channels.has_value()) {
    if (policy.mosaic.has_value() || policy.summaries.has_value()) {
      return Refuse("the policy drops key channels, and also packs or summarizes rows");
    }
    absl::Status status = CheckKeyChannels(*policy.key_channels);
    if (!status.ok()) return status;
  }
  if (policy.summaries.has_value()) {
    if (!kernels::IsBlock(policy.summaries->block)) {
      return Refuse("page ", policy.summaries->block, " is not 4, 8 or 16");
    }
    if (policy.summaries->summary == Summary::kNone)
      return Refuse("the policy has blocks without a summary");
  }
  return policy.selection.has_value() ? CheckSelection(policy) : absl::OkStatus();
}

absl::Status CheckFor(const Policy& policy, const kernels::LayerGeometry& geometry) {
  if (!kernels::IsHeadDim(geometry.head_dim)) {
    return Refuse("head_dim ", geometry.head_dim, " is not 64, 128 or 256");
  }
  if (policy.key_channels.has_value()) return CheckKeyChannelsFor(*policy.key_channels, geometry);
  if (policy.uses_books()) {
    const char* why = kernels::UnsupportedReason(BookPlanOf(policy, geometry).shape);
    return why == nullptr ? absl::OkStatus() : Refuse(policy.text, ": ", why);
  }
  if (!policy.mosaic.has_value()) {
    const char* why = kernels::UnsupportedReason(SummaryShape(policy, geometry));
    return why == nullptr ? absl::OkStatus() : Refuse(policy.text, ": ", why);
  }
  return CheckGroups(policy.mosaic->strategy, geometry.head_dim);
}

absl::Status CheckForModel(const Policy& policy, const ModelFacts& model) {
  for (const std::optional<TokenPolicy>& decides : {policy.tokens, policy.merging}) {
    if (!decides.has_value()) continue;
    const TokenSystem& system = *KindOf(*decides).tokens;
    if (system.check_model == nullptr) continue;
    if (absl::Status status = system.check_model(*decides, model); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace tessera::policies
