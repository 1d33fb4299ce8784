// The kernel operations as a function table: what an implementation (reference, avx2, avx512)
// offers, and whether this machine can run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/format/part.h"
#include "kernels/format/rotation.h"

namespace tessera::kernels {

struct Operations {
  // Each returns the name of the code that ran, a literal that the same file compiles in.
  const char* (*attend_part)(const AttendPart& part, const PartialRows& partial);
  const char* (*rotate)(const RotateJob& job);
  const char* (*unrotate)(const UnrotateJob& job);
  const char* (*score_part)(const ScorePart& part);
  const char* (*select)(const SelectJob& job);

  // The rotations in the order that `encode` reads them; the bytes that takes.
  std::size_t (*prepared_bytes)(const TileShape& shape, ElementType row_type);
  void (*prepare_encode)(const TileShape& shape, ElementType row_type, const RotationView& rotation,
                         std::byte* prepared);
  // False where a rotated value is not finite, or too large for the stored type (UnstorableBits);
  // the tile then holds anything.
  bool (*encode)(const EncodeJob& job);
  const char* (*decode)(const DecodeJob& job);
  const char* (*gather)(const GatherJob& job);
  const char* (*moments)(const MomentsJob& job);
  const char* (*observe)(const ObserveJob& job);

  // The index of the first element that is NaN, infinite or at least 2^63 in magnitude, or -1.
  std::int64_t (*first_unusable)(const void* elements, std::size_t count, ElementType type);
};

struct Support {
  bool supported = false;
  std::string_view reason;  // why not; empty where supported
};

}  // namespace tessera::kernels
