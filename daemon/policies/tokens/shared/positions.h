// The option `pos`, of systems that may have keys stand at their places in the lane.
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
        "Keys keep their rotary positions, or are turned to their places as others go (slot), "
        "so that generation has no end"};

inline bool BySlot(const Values& values) { return values.Word(kPositions) == kPositionWords[1]; }
inline void GivePositions(bool slot, Values& values) {
  values.Give(kPositions, kPositionWords[slot ? 1 : 0]);
}

// What is wrong with it beside the policy's other terms; empty: nothing.
std::string WhyNotBySlot(const Values& values, std::span<const Term> all);

}  // namespace tessera::policies
