// The kernel operations in scalar double precision: slow and simple. All other implementations are
// tested against them.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

const Operations& ReferenceOperations();

}  // namespace tessera::kernels
