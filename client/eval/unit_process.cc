#include "client/eval/unit_process.h"

#include <iostream>
#include <optional>

#include "absl/status/status.h"
#include "client/eval/unit_line.h"
#include "client/tools/flags.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {
constexpr std::string_view kAnswered = "answered";
}

absl::StatusOr<std::unique_ptr<UnitRunner>> UnitProcess::Start(const std::vector<std::string>& args,
                                                               const EvaluationPlan& plan) {
  absl::StatusOr<std::unique_ptr<WorkerProcess>> process = WorkerProcess::Start(args);
  if (!process.ok()) return process.status();
  return std::unique_ptr<UnitRunner>(new UnitProcess(*std::move(process), plan));
}

absl::StatusOr<FinishedUnit> UnitProcess::Run(std::size_t unit,
                                              const std::function<void()>& answered) {
  if (absl::Status status = process_->Tell(Concat(unit)); !status.ok()) return status;
  while (true) {
    const absl::StatusOr<std::string> line = process_->Hear();
    if (!line.ok()) return line.status();
    if (*line == kAnswered) {
      answered();
      continue;
    }
    absl::StatusOr<FinishedUnit> finished = UnitOf(*line, plan_);
    if (!finished.ok() || finished->unit == unit) return finished;
    return absl::InternalError(
        Concat("a worker process returned unit ", finished->unit, " instead of ", unit));
  }
}

absl::Status ServeUnits(UnitRunner& runner, std::size_t units) {
  for (std::string line; std::getline(std::cin, line);) {
    const std::optional<std::uint64_t> unit = WholeNumber(line);
    if (!unit || *unit >= units) {
      return absl::InvalidArgumentError(
          Concat("\"", line, "\" is not a unit number; there are ", units, " units, from 0"));
    }
    const absl::StatusOr<FinishedUnit> finished = runner.Run(*unit, [] { Answer(kAnswered); });
    if (!finished.ok()) return finished.status();
    Answer(LineOf(*finished));
  }
  return absl::OkStatus();
}

}  // namespace tessera::cli::eval
