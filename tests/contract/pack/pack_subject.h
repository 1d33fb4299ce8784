// The interface between an implementation of the tile operations and the conformance suite: a table
// of operations on host memory. For a device, each operation uploads, launches and copies back.
#pragma once

#include <string>

#include "kernels/format/error_bound.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

struct PackSubject {
  std::string name;  // the name that its operations must return
  const Operations* operations = nullptr;
  // Tests of an unsupported subject are skipped with the reason.
  bool supported = true;
  std::string reason;
  // Maximum error of a rotated channel, relative to the row's length.
  double rotation_error = 0;
  // Error bound of the shares and products in observe.
  ErrorBound shares;
  ErrorBound products;
  // Divides the number of random rounds, for slow implementations.
  int rounds_divisor = 1;
};

}  // namespace tessera::kernels
