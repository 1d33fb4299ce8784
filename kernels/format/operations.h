// The kernel operations as a function table: what an implementation (reference, avx2, avx512)
// offers, and whether this machine can run it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/format/part.h"

namespace tessera::kernels {

struct Operations {
  // Returns the name of the code that ran, a literal that the same file compiles in.
  const char* (*attend_part)(const AttendPart& part, const PartialRows& partial);

  // The index of the first element that is NaN, infinite or at least 2^63 in magnitude, or -1.
  std::int64_t (*first_unusable)(const void* elements, std::size_t count, ElementType type);
};

struct Support {
  bool supported = false;
  std::string_view reason;  // why not; empty where supported
};

}  // namespace tessera::kernels
