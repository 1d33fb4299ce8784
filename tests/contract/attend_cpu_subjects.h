// The CPU implementations as subjects of the suites.
#pragma once

#include <memory>
#include <vector>

#include "tests/contract/attend_subject.h"

namespace tessera::kernels {

std::vector<std::shared_ptr<AttendSubject>> CpuSubjects();

}  // namespace tessera::kernels
