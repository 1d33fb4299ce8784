// What the ISA files export: data, so that nothing compiled with their flags runs before its
// Support says that it may.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

extern const Operations kAvx2Operations;
extern const Operations kAvx512Operations;
extern const Operations kAvx512Vbmi2Operations;
extern const Operations kAvx512Bf16Operations;

}  // namespace tessera::kernels
