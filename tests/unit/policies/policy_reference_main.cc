// Prints deploy/docs/policy-options.md:  build/tests/policy_reference >
// deploy/docs/policy-options.md
#include <cstdio>

#include "tests/unit/policies/policy_reference.h"

int main() { return std::fputs(tessera::policies::PolicyReference().c_str(), stdout) < 0; }
