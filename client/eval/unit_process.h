// A runner in a child process. The parent sends a unit's number as a line; the child answers with
// one line per answered sample and policy, then the unit's line of JSON.
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
  // Runs `tessera ARGS...`, which must call ServeUnits with this plan. The plan must outlive the
  // object.
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

// Child side: runs the units named on stdin until its end.
absl::Status ServeUnits(UnitRunner& runner, std::size_t units);

}  // namespace tessera::cli::eval
