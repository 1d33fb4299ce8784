// The kernel operations as a function table: what an implementation (reference, avx2, avx512)
// provides, and whether this machine can run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/format/part.h"
#include "kernels/format/rotation.h"

namespace tessera::kernels {

struct Operations {
  // The functions that return a string return the name of the code that ran, a literal compiled
  // into that file.
  const char* (*attend_part)(const AttendPart& part, const PartialRows& partial);
  const char* (*rotate)(const RotateJob& job);
  const char* (*unrotate)(const UnrotateJob& job);
  const char* (*score_part)(const ScorePart& part);
  const char* (*select)(const SelectJob& job);

  // Converts the rotations into the form that `encode` reads; the size of that form in bytes.
  std::size_t (*prepared_bytes)(const TileShape& shape, ElementType row_type);
  void (*prepare_encode)(const TileShape& shape, ElementType row_type, const RotationView& rotation,
                         std::byte* prepared);
  // False if a rotated value is not finite or too large for the stored type (UnstorableBits). The
  // contents of the tile are then unspecified.
  bool (*encode)(const EncodeJob& job);
  const char* (*decode)(const DecodeJob& job);
  const char* (*gather)(const GatherJob& job);
  const char* (*moments)(const MomentsJob& job);
  const char* (*observe)(const ObserveJob& job);

  // The index of the first element that is NaN, infinite or at least 2^63 in magnitude; -1 if none.
  std::int64_t (*first_unusable)(const void* elements, std::size_t count, ElementType type);
};

struct Support {
  bool supported = false;
  std::string_view reason;  // why not; empty if supported
};

}  // namespace tessera::kernels
