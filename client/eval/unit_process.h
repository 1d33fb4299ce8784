// Units done by a process of its own, and what is said between it and its parent: to it a unit's
// number; from it a line for each answer, then the unit's line.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/evaluation.h"
#include "client/tools/worker_process.h"

namespace tessera::cli::eval {

class UnitProcess final : public UnitRunner {
 public:
  // `args` have `tessera` call ServeUnits with this plan, which must outlive the object.
  static absl::StatusOr<std::unique_ptr<UnitRunner>> Start(const std::vector<std::string>& args,
                                                           const EvaluationPlan& plan);
  absl::StatusOr<FinishedUnit> Run(std::size_t unit,
                                   const std::function<void()>& answered) override;

 private:
  UnitProcess(std::unique_ptr<WorkerProcess> process, const EvaluationPlan& plan)
      : process_(std::move(process)), plan_(plan) {}
  const std::unique_ptr<WorkerProcess> process_;
  const EvaluationPlan& plan_;
};

// The program of that process: does what stdin says until it ends.
absl::Status ServeUnits(UnitRunner& runner, std::size_t units);

}  // namespace tessera::cli::eval
