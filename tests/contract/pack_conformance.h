// The conformance suite of the operations on packed tiles: every implementation answers to the same
// tests. What must be the same bytes is compared with the reference; what may be rounded is judged
// in double by the definitions of kernels/format/part.h.
#pragma once

#include <string>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "tests/contract/pack_data.h"

namespace tessera::kernels {

class PackConformance : public testing::TestWithParam<const Implementation*> {
 protected:
  void SetUp() override {
    if (!ImplementationSupported(*GetParam())) {
      GTEST_SKIP() << name() << " did not run: " << ImplementationReason(*GetParam());
    }
  }

  std::string name() const { return std::string(ImplementationName(*GetParam())); }
  const Operations& ops() const { return OperationsOf(*GetParam()); }
  static const Operations& reference() { return OperationsOf(*FindImplementation("reference")); }

  // What an operation returns must name the implementation: another one must not have run.
  void ExpectRan(const char* ran) const { ASSERT_EQ(name(), ran) << "something else has run"; }

  TestRandom random_;
};

// First in a test that calls ops().operation.
#define TESSERA_NEEDS(operation) \
  ASSERT_NE(ops().operation, nullptr) << name() << " has no " #operation

inline std::string ImplementationParam(const testing::TestParamInfo<const Implementation*>& info) {
  return std::string(ImplementationName(*info.param));
}

}  // namespace tessera::kernels
