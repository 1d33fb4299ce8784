// The conformance suite of the operations on packed tiles, for all implementations. Exact results
// are compared with the reference byte by byte; rounded results are checked in double against the
// definitions in kernels/format/part.h. A file of subjects instantiates the suite.
#pragma once

#include <algorithm>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "tests/contract/pack/pack_data.h"
#include "tests/contract/pack/pack_subject.h"

namespace tessera::kernels {

using PackSubjectPtr = std::shared_ptr<const PackSubject>;

class PackSuite : public testing::TestWithParam<PackSubjectPtr> {
 protected:
  void SetUp() override {
    if (!subject().supported) GTEST_SKIP() << name() << " did not run: " << subject().reason;
  }

  const PackSubject& subject() const { return *GetParam(); }
  const std::string& name() const { return subject().name; }
  const Operations& ops() const { return *subject().operations; }
  static const Operations& reference() { return OperationsOf(*FindImplementation("reference")); }
  int Rounds(int rounds) const { return std::max(rounds / subject().rounds_divisor, 2); }

  // An operation must return the name of this implementation, so that no other one ran.
  void ExpectRan(const char* ran) const { ASSERT_EQ(name(), ran) << "something else has run"; }

  TestRandom random_;
};

// encode, decode, gather, moments and observe, for every implementation.
class PackConformance : public PackSuite {};

// rotate, unrotate, score and select as separate calls, for the CPU implementations that attention
// is built from. On a device they are steps of a launch and tested by the attention suite.
class PartConformance : public PackSuite {};

// Must come first in a test that calls ops().operation.
#define TESSERA_NEEDS(operation) \
  ASSERT_NE(ops().operation, nullptr) << name() << " has no " #operation

inline std::string PackSubjectName(const testing::TestParamInfo<PackSubjectPtr>& info) {
  return info.param->name;
}

}  // namespace tessera::kernels
