// What became of lanes, as messages.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/cache/sequence/sequence.h"
#include "daemon/compaction/lanes/lane_outcome.h"
#include "tessera/v1/outcome.pb.h"

namespace tessera::serving {

void Describe(const compaction::LaneOutcome& outcome, v1::LaneOutcome& out);

// Lanes of the same state and reason as one, the most lanes first. `outcomes` has one for each of
// `lanes`.
google::protobuf::RepeatedPtrField<v1::OutcomeGroup> GroupOutcomes(
    std::span<const cache::Sequence::LaneDescription> lanes,
    std::span<const compaction::LaneOutcome> outcomes);

// Of a call: lanes that are compressed, and were as they are before it, get kNothingNew.
void NoteNothingNew(std::span<const cache::Sequence::LaneDescription> before,
                    std::span<const cache::Sequence::LaneDescription> after,
                    std::span<compaction::LaneOutcome> outcomes);

}  // namespace tessera::serving
