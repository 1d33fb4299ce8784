// Runs an evaluation: each prompt is computed once and forked for every policy.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "client/eval/plan.h"
#include "client/eval/tasks/recall_tasks.h"
#include "client/model/model.h"
#include "tessera/options.h"

namespace tessera::cli::eval {

// Runs units one after another. A unit's outcome does not depend on the runner.
class UnitRunner {
 public:
  virtual ~UnitRunner() = default;
  // Runs the unit with this index. Calls `answered` once per sample and policy.
  virtual absl::StatusOr<FinishedUnit> Run(std::size_t unit,
                                           const std::function<void()>& answered) = 0;
};

class Evaluation {
 public:
  struct Options {
    std::string model_folder;
    std::string address;
    std::string device;  // as AttachOptions::device
    std::optional<client::TlsOptions> tls;
    bool map_memory = true;
  };
  static absl::StatusOr<std::unique_ptr<Evaluation>> Open(const Options& options);

  // K and V of one uncompressed token, over all layers.
  std::uint64_t dense_bytes_per_token() const;

  // Called by one thread at a time.
  struct Listener {
    std::function<void(const Unit&)> answered;  // one sample under one policy
    std::function<absl::Status(const FinishedUnit&)> finished;
  };
  using StartRunner = std::function<absl::StatusOr<std::unique_ptr<UnitRunner>>()>;
  struct RunOptions {
    std::uint32_t runners = 1;     // each with its own thread, taking units from one queue
    StartRunner start;             // unset: runners in this process, from Runner()
    std::set<std::size_t> except;  // units that are already finished
  };
  // Checks policies and tasks before the first sample.
  absl::Status Run(const EvaluationPlan& plan, const RunOptions& run, const Listener& listener);

  // A runner in this process with its own session. The plan and this object must outlive it.
  absl::StatusOr<std::unique_ptr<UnitRunner>> Runner(const EvaluationPlan& plan) const;

 private:
  class Session;  // a runner attached to the daemon as a worker
  explicit Evaluation(const Options& options) : options_(options) {}
  absl::Status CheckPlan(const EvaluationPlan& plan) const;

  const Options options_;
  std::unique_ptr<llm::Model> model_;
  std::optional<llm::Vocab> vocab_;
  std::optional<RecallTasks> tasks_;
};

}  // namespace tessera::cli::eval
