// The rows of the registry, each in the file of its system.
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
extern const TermKind kThink;
extern const TermKind kQuest;
extern const TermKind kSelect;
extern const TermKind kBf16;
extern const TermKind kFp16;
extern const TermKind kInt8;
extern const TermKind kFp8;

// A lane holds no more entries; budgets beyond it say nothing.
inline constexpr double kMostEntries =
    static_cast<double>(std::uint64_t{shm::kMaxSegments} * shm::kMaxSegmentEntries);

// The least budget of a selection by rate, as it is written. Where a context is short, a share of
// it is too few entries to answer from.
inline constexpr std::string_view kStandardFloor = "1024";

// Of kernels::SelectionRule::Judge.
inline constexpr std::string_view kJudgeWords[] = {"share", "logit"};
kernels::SelectionRule::Judge JudgeOf(std::string_view word);
std::string_view JudgeWord(kernels::SelectionRule::Judge judge);

// Of kernels::SelectionRule::each_head.
inline constexpr std::string_view kHeadsWords[] = {"group", "each"};
bool ChooseEach(std::string_view word);
std::string_view HeadsWord(bool each_head);

// Of Scope.
inline constexpr std::string_view kScopeWords[] = {"layer", "head"};
inline Scope ScopeOf(std::string_view word) {
  return word == kScopeWords[1] ? Scope::kHead : Scope::kLayer;
}
inline std::string_view ScopeWord(Scope scope) {
  return kScopeWords[scope == Scope::kHead ? 1 : 0];
}

// Whether the policy's blocks are summed up for Quest, packed or not.
bool IsQuest(const Policy& policy);

}  // namespace tessera::policies
