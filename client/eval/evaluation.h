// Runs an evaluation: a prompt is computed once, and forked for each policy.
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

// Who does units, one after the other. Whoever does one, its outcomes are the same.
class UnitRunner {
 public:
  virtual ~UnitRunner() = default;
  // By its number. `answered` is called for each sample under each policy.
  virtual absl::StatusOr<FinishedUnit> Run(std::size_t unit,
                                           const std::function<void()>& answered) = 0;
};

class Evaluation {
 public:
  struct Options {
    std::string model_folder;
    std::string address;
    std::optional<client::TlsOptions> tls;
    bool map_memory = true;
  };
  static absl::StatusOr<std::unique_ptr<Evaluation>> Open(const Options& options);

  // What a token's K and V take where nothing is compressed.
  std::uint64_t dense_bytes_per_token() const;

  // Called by one thread at a time.
  struct Listener {
    std::function<void(const Unit&)> answered;  // one sample, under one policy
    std::function<absl::Status(const FinishedUnit&)> finished;
  };
  using StartRunner = std::function<absl::StatusOr<std::unique_ptr<UnitRunner>>()>;
  struct RunOptions {
    std::uint32_t runners = 1;     // which take units by turns, each waited for by a thread
    StartRunner start;             // nothing: runners of this process, as Runner gives them
    std::set<std::size_t> except;  // units that are finished already
  };
  // Whatever cannot be, a policy that does not parse say, is found out before the first sample.
  absl::Status Run(const EvaluationPlan& plan, const RunOptions& run, const Listener& listener);

  // A runner with a session of its own in this process. The plan must outlive it, as must this.
  absl::StatusOr<std::unique_ptr<UnitRunner>> Runner(const EvaluationPlan& plan) const;

 private:
  class Session;  // a worker of the daemon
  explicit Evaluation(const Options& options) : options_(options) {}
  absl::Status CheckPlan(const EvaluationPlan& plan) const;

  const Options options_;
  std::unique_ptr<llm::Model> model_;
  std::optional<llm::Vocab> vocab_;
  std::optional<RecallTasks> tasks_;
};

}  // namespace tessera::cli::eval
