// An implementation of the operations on packed tiles as the conformance suite sees it: a table of
// operations on host memory. The CPU ones are what they are; one for another device uploads,
// launches and copies back.
#pragma once

#include <string>

#include "kernels/format/error_bound.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

struct PackSubject {
  std::string name;  // what operations must answer when this one has run
  const Operations* operations = nullptr;
  // Where this machine or build cannot run it, its tests are skipped with the reason.
  bool supported = true;
  std::string reason;
  // How far a rotated channel may be from the exact one, as a share of the row's length.
  double rotation_error = 0;
  // What observe adds: shares, and products.
  ErrorBound shares;
  ErrorBound products;
  // 1 / n of the rounds of random inputs: for what is too slow to run as many as the others.
  int rounds_divisor = 1;
};

}  // namespace tessera::kernels
