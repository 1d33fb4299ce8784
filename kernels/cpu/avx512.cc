// The only file compiled for this instruction set. It exports one table; everything else is
// internal.
#include "kernels/cpu/simd/bytes_avx512-inl.h"
#include "kernels/cpu/simd/simd_avx512-inl.h"
// `Simd` must come first: the algorithms below are written over it.
#include "kernels/cpu/operations-inl.h"
#include "kernels/cpu/simd/isa.h"

namespace tessera::kernels {

const Operations kAvx512Operations = kOperations;

}  // namespace tessera::kernels
