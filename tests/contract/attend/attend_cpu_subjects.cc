#include <memory>
#include <string>
#include <vector>

#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"
#include "tests/contract/attend/attend_conformance.h"

namespace tessera::kernels {
namespace {

class CpuSubject final : public AttendSubject {
 public:
  explicit CpuSubject(const Implementation& implementation) : implementation_(implementation) {}

  std::string_view name() const override { return ImplementationName(implementation_); }
  bool supported() const override { return ImplementationSupported(implementation_); }
  std::string reason() const override { return std::string(ImplementationReason(implementation_)); }
  ErrorBound bound(ElementType) const override {
    return name() == "reference" ? kReferenceErrorBound : kCpuErrorBound;
  }
  ErrorBound bound_of(const TileShape& shape) const override {
    if (shape.planes()) {
      return name() == "reference" ? kReferencePlanesErrorBound : kCpuPlanesErrorBound;
    }
    if (!shape.packed()) return bound(ElementsOf(shape.format));
    if (name() == "reference") return kReferencePackedErrorBound;
    const bool pairs = name() == "avx512bf16" && ValuesOf(shape.format) != ValueType::kFp16;
    return pairs ? kCpuBf16PackedErrorBound : kCpuPackedErrorBound;
  }
  bool rows_are_independent() const override { return true; }

  // Uses a workspace of exactly the requested size, so that AddressSanitizer detects overruns.
  AttendResult Run(const AttendBatch& batch, Executor& executor) override {
    const Buffer workspace(AttendWorkspaceBytes(batch));
    return Attend(implementation_, batch, {workspace.data(), workspace.size()}, executor);
  }

  AttendResult Choose(const AttendBatch& batch, Executor& executor, SelectionSink& sink) override {
    const Buffer workspace(AttendWorkspaceBytes(batch));
    return Select(implementation_, batch, {workspace.data(), workspace.size()}, executor, sink);
  }
  // This implementation rounds the query to bf16.
  double value_tolerance() const override { return name() == "avx512bf16" ? 0.05 : 1e-4; }

 private:
  const Implementation& implementation_;
};

std::vector<std::shared_ptr<AttendSubject>> CpuSubjects() {
  std::vector<std::shared_ptr<AttendSubject>> subjects;
  for (const Implementation* implementation : Implementations()) {
    subjects.push_back(std::make_shared<CpuSubject>(*implementation));
  }
  return subjects;
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttendConformance, testing::ValuesIn(CpuSubjects()), SubjectName);
INSTANTIATE_TEST_SUITE_P(Cpu, AttendPackedConformance, testing::ValuesIn(CpuSubjects()),
                         SubjectName);
INSTANTIATE_TEST_SUITE_P(Cpu, AttendPlanes, testing::ValuesIn(CpuSubjects()), SubjectName);
INSTANTIATE_TEST_SUITE_P(Cpu, AttendSelection, testing::ValuesIn(CpuSubjects()), SubjectName);

}  // namespace
}  // namespace tessera::kernels
