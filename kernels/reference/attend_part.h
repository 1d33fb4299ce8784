// The kernel operations in scalar double precision. Slow, obvious, and the yardstick of the others.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

const Operations& ReferenceOperations();

}  // namespace tessera::kernels
