// The entry points of the ISA files. Call one only where its Support says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/part.h"

namespace tessera::kernels {

const char* AttendPartAvx2(const AttendPart& part, const PartialRows& partial);
std::int64_t FirstUnusableAvx2(const void* elements, std::size_t count, ElementType type);

const char* AttendPartAvx512(const AttendPart& part, const PartialRows& partial);
std::int64_t FirstUnusableAvx512(const void* elements, std::size_t count, ElementType type);

}  // namespace tessera::kernels
