// The operations on packed tiles in scalar double precision. kernels/format/part.h defines them.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

const char* RotateReference(const RotateJob& job);
const char* UnrotateReference(const UnrotateJob& job);
const char* ScorePartReference(const ScorePart& part);
const char* SelectReference(const SelectJob& job);

std::size_t PreparedBytesReference(const TileShape& shape, ElementType row_type);
void PrepareEncodeReference(const TileShape& shape, ElementType row_type,
                            const RotationView& rotation, std::byte* prepared);
bool EncodeReference(const EncodeJob& job);
const char* DecodeReference(const DecodeJob& job);
const char* GatherReference(const GatherJob& job);
const char* MomentsReference(const MomentsJob& job);
const char* ObserveReference(const ObserveJob& job);

}  // namespace tessera::kernels
