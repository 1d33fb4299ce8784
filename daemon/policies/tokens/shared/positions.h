// The option `pos`: whether rotary positions are original token positions or indices in the lane.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "daemon/policies/option.h"
#include "daemon/policies/registry.h"

namespace tessera::policies {

inline constexpr std::string_view kPositions = "pos";
inline constexpr std::string_view kPositionWords[] = {"original", "slot"};

inline constexpr Option kPositionsOption = {
    .name = kPositions,
    .type = OptionType::kWord,
    .standard = "original",
    .words = kPositionWords,
    .help =
        "Whether keys keep their original rotary positions, or are re-rotated to their index in "
        "the lane (slot), which allows endless generation"};

inline bool BySlot(const Values& values) { return values.Word(kPositions) == kPositionWords[1]; }
inline void GivePositions(bool slot, Values& values) {
  values.Give(kPositions, kPositionWords[slot ? 1 : 0]);
}

// The conflict with the policy's other terms; empty if there is none.
std::string SlotPositionConflict(const Values& values, std::span<const Term> all);

}  // namespace tessera::policies
