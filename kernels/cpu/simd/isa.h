// The tables that the ISA files export. They are data, so nothing compiled with ISA flags runs
// before Support has been checked.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

extern const Operations kAvx2Operations;
extern const Operations kAvx512Operations;
extern const Operations kAvx512Vbmi2Operations;
extern const Operations kAvx512Bf16Operations;

}  // namespace tessera::kernels
