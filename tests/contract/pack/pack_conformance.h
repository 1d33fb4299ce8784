// The conformance suite of the operations on packed tiles: every implementation answers to the same
// tests. What must be the same bytes is compared with the reference; what may be rounded is judged
// in double by the definitions of kernels/format/part.h. A file of subjects instantiates it.
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

  // What an operation returns must name the implementation: another one must not have run.
  void ExpectRan(const char* ran) const { ASSERT_EQ(name(), ran) << "something else has run"; }

  TestRandom random_;
};

// encode, decode, gather, moments, observe: of every implementation.
class PackConformance : public PackSuite {};

// rotate, unrotate, score, select, as calls of their own: of those that attention on the CPU is put
// together from. On a device they are steps of a launch, and the suite of attention judges them.
class PartConformance : public PackSuite {};

// First in a test that calls ops().operation.
#define TESSERA_NEEDS(operation) \
  ASSERT_NE(ops().operation, nullptr) << name() << " has no " #operation

inline std::string PackSubjectName(const testing::TestParamInfo<PackSubjectPtr>& info) {
  return info.param->name;
}

}  // namespace tessera::kernels
