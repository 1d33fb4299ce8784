// The conformance suite of attention. A test binary links the suite and instantiates it with
//
//   INSTANTIATE_TEST_SUITE_P(Cpu, AttendConformance, testing::ValuesIn(Subjects()), SubjectName);
//
// so that all implementations pass the same tests against the same oracle.
#pragma once

#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/contract/attend/attend_batch.h"
#include "tests/contract/attend/attend_subject.h"

namespace tessera::kernels {

class AttendConformance : public testing::TestWithParam<std::shared_ptr<AttendSubject>> {
 protected:
  void SetUp() override {
    if (!subject().supported()) {
      GTEST_SKIP() << subject().name() << " did not run: " << subject().reason();
    }
  }

  AttendSubject& subject() { return *GetParam(); }

  // Runs a batch, which must succeed, and compares it with the oracle.
  void RunAndJudge(TestBatch& batch) {
    const AttendResult result = batch.Run(subject());
    ASSERT_EQ(result.status, AttendStatus::kOk);
    batch.Judge(subject(), random_);
  }

  TestRandom random_;
};

// The same for lanes with packed segments.
class AttendPackedConformance : public AttendConformance {};

// The same with block selection (attend_selection_test.cc).
class AttendSelection : public AttendConformance {};

// The same for lanes with planes and signs.
class AttendPlanes : public AttendConformance {};

inline std::string SubjectName(const testing::TestParamInfo<std::shared_ptr<AttendSubject>>& info) {
  return std::string(info.param->name());
}

}  // namespace tessera::kernels
