// The one file compiled for this ISA. It defines two functions; everything else is internal.
#include "kernels/cpu/simd_avx512-inl.h"
// The vocabulary comes first: the algorithms below are written over it.
#include "kernels/cpu/attend_part-inl.h"
#include "kernels/cpu/first_unusable-inl.h"
#include "kernels/cpu/isa.h"

namespace tessera::kernels {

const char* AttendPartAvx512(const AttendPart& part, const PartialRows& partial) {
  AttendPartSimd(part, partial);
  return "avx512";
}

std::int64_t FirstUnusableAvx512(const void* elements, std::size_t count, ElementType type) {
  return FirstUnusableSimd(elements, count, type);
}

}  // namespace tessera::kernels
