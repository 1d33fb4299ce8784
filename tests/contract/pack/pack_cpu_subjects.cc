// The CPU implementations as subjects of the suites of packed tiles.
#include <memory>
#include <vector>

#include "tests/contract/pack/pack_conformance.h"
#include "tests/contract/pack/pack_planes.h"

namespace tessera::kernels {
namespace {

std::vector<PackSubjectPtr> Subjects() {
  std::vector<PackSubjectPtr> subjects;
  for (const Implementation* implementation : Implementations()) {
    PackSubject subject = {.name = std::string(ImplementationName(*implementation)),
                           .supported = ImplementationSupported(*implementation),
                           .reason = std::string(ImplementationReason(*implementation)),
                           .rotation_error = 0x1p-19,
                           .shares = kCpuObserveErrorBound,
                           .products = {.per_logit_mass = kObservedProductError}};
    if (subject.supported) subject.operations = &OperationsOf(*implementation);
    if (subject.name == "reference") {
      subject.shares = subject.products = kReferenceObserveErrorBound;
    }
    subjects.push_back(std::make_shared<PackSubject>(std::move(subject)));
  }
  return subjects;
}

INSTANTIATE_TEST_SUITE_P(Cpu, PackConformance, testing::ValuesIn(Subjects()), PackSubjectName);
INSTANTIATE_TEST_SUITE_P(Cpu, PartConformance, testing::ValuesIn(Subjects()), PackSubjectName);

}  // namespace

std::vector<PackSubjectPtr> PlanesSubjects() { return Subjects(); }

}  // namespace tessera::kernels
