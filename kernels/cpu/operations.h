// The vectorised implementations of the kernel operations.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

const Operations& Avx2();
const Operations& Avx512();
const Operations& Avx512Vbmi2();
const Operations& Avx512Bf16();

}  // namespace tessera::kernels
