// The one file compiled for this instruction set. It exports a table; everything else is internal.
#include "kernels/cpu/simd/simd_avx512-inl.h"
// The vocabulary comes first: the algorithms below are written over it.
#include "kernels/cpu/operations-inl.h"
#include "kernels/cpu/simd/isa.h"

namespace tessera::kernels {

const Operations kAvx512Bf16Operations = kOperations;

}  // namespace tessera::kernels
