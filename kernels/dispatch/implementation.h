// The implementations of the kernel operations, and the choice among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/dispatch/attend.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// In order of preference, best last: reference, avx2, avx512, avx512vbmi2, avx512bf16. Includes
// those that this build or machine cannot run: see ImplementationSupported and
// ImplementationReason. Calling an operation of an unsupported implementation aborts.
std::span<const Implementation* const> Implementations();

// Null if no implementation has that name.
const Implementation* FindImplementation(std::string_view name);

// The preferred implementation that this machine supports. Decided once, from CPUID.
const Implementation& BestImplementation();

std::string_view ImplementationName(const Implementation& implementation);
// The operations on tiles; kernels/format/part.h defines them. Aborts if this machine cannot run
// them.
const Operations& OperationsOf(const Implementation& implementation);

bool ImplementationSupported(const Implementation& implementation);
std::string_view ImplementationReason(const Implementation& implementation);  // empty if supported

// The index of the first element that may not be stored in a tile, or -1. Those are NaN, infinity
// and magnitudes of at least 2^63, whose squares would overflow fp32 sums.
std::int64_t FirstUnusable(const Implementation& implementation, const void* elements,
                           std::size_t count, ElementType type);

}  // namespace tessera::kernels
