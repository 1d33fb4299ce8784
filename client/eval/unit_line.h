// A finished unit as one line of JSON, for state files and worker processes.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "client/eval/plan.h"

namespace tessera::cli::eval {

std::string LineOf(const FinishedUnit& unit);
// INVALID_ARGUMENT if the line is malformed or contradicts the plan.
absl::StatusOr<FinishedUnit> UnitOf(std::string_view line, const EvaluationPlan& plan);

}  // namespace tessera::cli::eval
