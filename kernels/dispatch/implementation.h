// The list of implementations of the kernel operations, and the choice among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/dispatch/attend.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// In the order of preference, best last: reference, avx2, avx512, avx512vbmi2, avx512bf16. Those
// that this build or this machine cannot run are listed too: ImplementationSupported tells,
// ImplementationReason says why not. Calling an operation of an unsupported one aborts.
std::span<const Implementation* const> Implementations();

// Null where no implementation has that name.
const Implementation* FindImplementation(std::string_view name);

// The fastest one this machine supports. Decided once from CPUID: the last of the list that is
// supported, but avx512bf16 only where pair dot products are fast.
const Implementation& BestImplementation();

std::string_view ImplementationName(const Implementation& implementation);
// The operations on tiles, one call each: see kernels/format/part.h for what they compute. Aborts
// where this machine cannot run them.
const Operations& OperationsOf(const Implementation& implementation);

bool ImplementationSupported(const Implementation& implementation);
std::string_view ImplementationReason(const Implementation& implementation);  // empty if supported

// The index of the first of `elements` that may not enter a tile, or -1: NaN, infinity, or a
// magnitude of at least 2^63, whose square would overflow fp32 sums.
std::int64_t FirstUnusable(const Implementation& implementation, const void* elements,
                           std::size_t count, ElementType type);

}  // namespace tessera::kernels
