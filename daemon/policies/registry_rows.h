// The registry's rows, each defined in the file of its system, and the option words they share.
#pragma once

#include <cstdint>
#include <string_view>

#include "daemon/policies/registry.h"
#include "proto/shm/layout.h"

namespace tessera::policies {

extern const TermKind kDense;
extern const TermKind kChunkKv;
extern const TermKind kSemanticKv;
extern const TermKind kSemantiCache;
extern const TermKind kLaCache;
extern const TermKind kStreaming;
extern const TermKind kH2o;
extern const TermKind kSnapKv;
extern const TermKind kPyramidKv;
extern const TermKind kTova;
extern const TermKind kMosaicKv;
extern const TermKind kPlanes;
extern const TermKind kThink;
extern const TermKind kQuest;
extern const TermKind kSelect;
extern const TermKind kSigns;
extern const TermKind kBf16;
extern const TermKind kFp16;
extern const TermKind kInt8;
extern const TermKind kFp8;

// The most entries that a lane can hold: the upper limit of budgets.
inline constexpr double kMostEntries =
    static_cast<double>(std::uint64_t{shm::kMaxSegments} * shm::kMaxSegmentEntries);

// Default for the least budget of a selection by rate: in a short context a share of the entries is
// too few to answer from.
inline constexpr std::string_view kStandardFloor = "1024";

// Words for kernels::SelectionRule::Judge.
inline constexpr std::string_view kJudgeWords[] = {"share", "logit"};
kernels::SelectionRule::Judge JudgeOf(std::string_view word);
std::string_view JudgeWord(kernels::SelectionRule::Judge judge);

// Words for kernels::SelectionRule::each_head.
inline constexpr std::string_view kHeadsWords[] = {"group", "each"};
bool ChooseEach(std::string_view word);
std::string_view HeadsWord(bool each_head);

// Words for Scope.
inline constexpr std::string_view kScopeWords[] = {"layer", "head"};
inline Scope ScopeOf(std::string_view word) {
  return word == kScopeWords[1] ? Scope::kHead : Scope::kLayer;
}
inline std::string_view ScopeWord(Scope scope) {
  return kScopeWords[scope == Scope::kHead ? 1 : 0];
}

// Whether the policy's blocks have min/max summaries, of packed or dense rows.
bool IsQuest(const Policy& policy);

}  // namespace tessera::policies
