// The vectorised implementations of the kernel operations.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

const Operations& Avx2Operations();
const Operations& Avx512Operations();

}  // namespace tessera::kernels
