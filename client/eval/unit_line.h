// A finished unit as a line of JSON: in state files, and from worker processes.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/eval/plan.h"

namespace tessera::cli::eval {

std::string LineOf(const FinishedUnit& unit);
// INVALID_ARGUMENT says what cannot be in that plan.
absl::StatusOr<FinishedUnit> UnitOf(std::string_view line, const EvaluationPlan& plan);

}  // namespace tessera::cli::eval
