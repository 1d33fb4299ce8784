// Converts the outcomes of compression to messages.
#pragma once

#include <cstdint>
#include <span>

#include "daemon/cache/sequence/sequence.h"
#include "daemon/compaction/lanes/lane_outcome.h"
#include "tessera/v1/outcome.pb.h"

namespace tessera::serving {

void Describe(const compaction::LaneOutcome& outcome, v1::LaneOutcome& out);

// Groups lanes with the same state and reason; the largest group is first. `outcomes` has one
// element per lane.
google::protobuf::RepeatedPtrField<v1::OutcomeGroup> GroupOutcomes(
    std::span<const cache::Sequence::LaneDescription> lanes,
    std::span<const compaction::LaneOutcome> outcomes);

// Sets kNothingNew for compressed lanes that a call has not changed.
void NoteNothingNew(std::span<const cache::Sequence::LaneDescription> before,
                    std::span<const cache::Sequence::LaneDescription> after,
                    std::span<compaction::LaneOutcome> outcomes);

}  // namespace tessera::serving
