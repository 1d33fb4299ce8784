#include "client/eval/evaluation.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "client/eval/compressed_fork.h"
#include "client/model/generate.h"
#include "daemon/base/strings.h"
#include "tessera/worker.h"

namespace tessera::cli::eval {

namespace {

// A prompt, computed once.
struct Prompt {
  explicit Prompt(const llm::Config& config) : rows(config) {}
  std::span<const TokenId> tokens;
  PromptRows rows;
};

double SecondsSince(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Updates a running mean with `value`, the count-th value.
void AddToMean(double value, std::uint32_t count, double& mean) { mean += (value - mean) / count; }

}  // namespace

class Evaluation::Session final : public UnitRunner {
 public:
  static absl::StatusOr<std::unique_ptr<Session>> Attach(const Evaluation& evaluation,
                                                         const EvaluationPlan& plan) {
    std::unique_ptr<Session> session(new Session(evaluation, plan));
    absl::StatusOr<std::unique_ptr<client::Worker>> worker =
        client::Worker::Attach({.address = evaluation.options_.address,
                                .device = evaluation.options_.device,
                                .tls = evaluation.options_.tls,
                                .worker_name = "eval",
                                .map_memory = evaluation.options_.map_memory,
                                // The table says it (Outcome::not_packed).
                                .on_warning = [](std::string_view) {}});
    if (!worker.ok()) return worker.status();
    session->worker_ = *std::move(worker);
    absl::StatusOr<client::Model> registered = session->worker_->RegisterModel(
        llm::GeometryOf(evaluation.model_->config(), "recall", evaluation.vocab_->delimiters()));
    if (!registered.ok()) return registered.status();
    session->registered_ = *std::move(registered);
    return session;
  }

  absl::Status Try(const std::string& policy) {
    return worker_->CreateSequence(registered_, policy).status();
  }

  absl::StatusOr<FinishedUnit> Run(std::size_t number,
                                   const std::function<void()>& answered) override {
    const Unit& unit = units_[number];
    FinishedUnit finished = {.unit = number};
    finished.outcomes.resize(plan_.policies.size());
    for (Outcome& outcome : finished.outcomes) outcome.marks.assign(plan_.samples, '-');
    finished.example.answers.resize(plan_.policies.size());
    for (std::uint32_t i = 0; i < plan_.samples; ++i) {
      const absl::StatusOr<RecallSample> sample =
          evaluation_.tasks_->Sample({.task = unit.task,
                                      .length = unit.length,
                                      .depth = unit.depth,
                                      .seed = plan_.first_seed + i});
      if (!sample.ok()) return sample.status();
      absl::Status status = Answer(unit, *sample, i, answered, finished);
      if (!status.ok()) return status;
    }
    return finished;
  }

 private:
  // A compressed fork, ready for the question.
  struct Fork {
    std::size_t policy;
    CompressedForks::Fork of;
  };

  Session(const Evaluation& evaluation, const EvaluationPlan& plan)
      : evaluation_(evaluation), plan_(plan), units_(UnitsOf(plan)) {}

  absl::Status Answer(const Unit& unit, const RecallSample& sample, std::uint32_t index,
                      const std::function<void()>& answered, FinishedUnit& finished) {
    absl::StatusOr<Prompt> prompt = Compute(unit, sample);
    if (!prompt.ok()) return prompt.status();
    absl::StatusOr<CompressedForks> compressed =
        CompressedForks::Create(prompt->rows, prompt->tokens, *worker_, registered_);
    absl::Status status = compressed.status();
    std::vector<Fork> forks;
    for (std::size_t policy = 0; status.ok() && policy < plan_.policies.size(); ++policy) {
      Outcome& outcome = finished.outcomes[policy];
      absl::StatusOr<CompressedForks::Fork> fork =
          compressed->Compress(plan_.policies[policy].For(unit.length));
      if (fork.ok()) {
        forks.push_back({policy, *std::move(fork)});
      } else if (absl::IsInvalidArgument(fork.status())) {
        outcome.refused = std::string(AsStringView(fork.status().message()));
        answered();
      } else {
        status = fork.status();
      }
      if (forks.size() == plan_.batch || policy + 1 == plan_.policies.size()) {
        if (status.ok()) status = Ask(sample, *prompt, index, forks, finished);
        for (std::size_t i = 0; i < forks.size(); ++i) answered();
        forks.clear();
      }
    }
    return status;
  }

  absl::StatusOr<Prompt> Compute(const Unit& unit, const RecallSample& sample) const {
    // The last token goes into the first step, so that the compressed cache gives the answer.
    Prompt prompt(evaluation_.model_->config());
    prompt.tokens = sample.prompt;
    prompt.tokens = prompt.tokens.first(
        sample.prompt.size() - (unit.question == Question::kSeen ? 1 : sample.question_tokens));
    std::vector<std::uint32_t> positions(prompt.tokens.size());
    std::iota(positions.begin(), positions.end(), 0);
    const absl::Status status =
        evaluation_.model_->Forward({.tokens = prompt.tokens, .positions = positions}, prompt.rows)
            .status();
    if (!status.ok()) return status;
    return prompt;
  }

  // Feeds the question and decodes the answer for all forks in the same steps.
  absl::Status Ask(const RecallSample& sample, const Prompt& prompt, std::uint32_t index,
                   std::vector<Fork>& forks, FinishedUnit& finished) {
    const std::span<const TokenId> question =
        std::span(sample.prompt).subspan(prompt.tokens.size());
    std::vector<llm::Turn> turns;
    std::vector<client::Sequence*> batch;
    for (Fork& fork : forks) {
      turns.push_back({.sequence = &fork.of.sequence, .tokens = question});
      batch.push_back(&fork.of.sequence);
    }
    if (forks.empty()) return absl::OkStatus();
    absl::StatusOr<std::vector<float>> logits = llm::Advance(*evaluation_.model_, *worker_, turns);
    if (!logits.ok()) return logits.status();
    const auto begun = std::chrono::steady_clock::now();
    const absl::StatusOr<std::vector<Tokens>> answers =
        llm::Generate(*evaluation_.model_, *worker_, batch, *std::move(logits),
                      {.max_tokens = static_cast<std::uint32_t>(sample.answer.size())});
    if (!answers.ok()) return answers.status();
    // The first token comes from the question's logits and takes no step.
    const double steps = std::max<double>(1, static_cast<double>(sample.answer.size()) - 1);
    const double step_ms = SecondsSince(begun) * 1e3 / steps;
    for (std::size_t i = 0; i < forks.size(); ++i) {
      Outcome& outcome = finished.outcomes[forks[i].policy];
      const bool right = (*answers)[i] == sample.answer;
      outcome.marks[index] = right ? '1' : '0';
      outcome.right += right ? 1 : 0;
      outcome.samples += 1;
      AddToMean(forks[i].of.bytes_kept, outcome.samples, outcome.bytes_kept);
      AddToMean(step_ms, outcome.samples, outcome.step_ms);
      if (outcome.not_packed.empty()) outcome.not_packed = forks[i].of.not_packed;
      if (index == 0) {
        finished.example.answers[forks[i].policy] = evaluation_.vocab_->Decode((*answers)[i]);
      }
    }
    if (index == 0) {
      finished.example.question = evaluation_.vocab_->Decode(
          std::span(sample.prompt).last(sample.question_tokens).subspan(1));
      finished.example.answer = evaluation_.vocab_->Decode(sample.answer);
    }
    return absl::OkStatus();
  }

  const Evaluation& evaluation_;
  const EvaluationPlan& plan_;
  const std::vector<Unit> units_;
  std::unique_ptr<client::Worker> worker_;
  client::Model registered_;
};

absl::StatusOr<std::unique_ptr<Evaluation>> Evaluation::Open(const Options& options) {
  std::unique_ptr<Evaluation> evaluation(new Evaluation(options));
  absl::StatusOr<llm::Vocab> vocab = llm::Vocab::Read(options.model_folder + "/vocab.json");
  if (!vocab.ok()) return vocab.status();
  evaluation->vocab_.emplace(*std::move(vocab));
  absl::StatusOr<RecallTasks> tasks = RecallTasks::Create(*evaluation->vocab_);
  if (!tasks.ok()) return tasks.status();
  evaluation->tasks_.emplace(*std::move(tasks));
  absl::StatusOr<std::unique_ptr<llm::Model>> model = llm::Model::Load(options.model_folder);
  if (!model.ok()) return model.status();
  evaluation->model_ = *std::move(model);
  return evaluation;
}

std::uint64_t Evaluation::dense_bytes_per_token() const {
  const llm::Config& config = model_->config();
  return std::uint64_t{2} * config.layers * config.kv_row() * sizeof(std::uint16_t);
}

absl::Status Evaluation::CheckPlan(const EvaluationPlan& plan) const {
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Attach(*this, plan);
  if (!session.ok()) return session.status();
  // A policy may be refused at some budgets; that is a result. Refused at all of them, it is a
  // user error.
  std::set<std::string> possible;
  std::map<std::string, absl::Status> refused;
  for (const std::uint32_t length : plan.lengths) {
    for (const PolicyAt& policy : plan.policies) {
      const std::string text = policy.For(length);
      const absl::Status status = (*session)->Try(text);
      if (status.ok()) {
        possible.insert(policy.text);
      } else if (!absl::IsInvalidArgument(status)) {
        return status;
      } else {
        refused[policy.text] =
            absl::InvalidArgumentError(Concat(text, ": ", AsStringView(status.message())));
      }
    }
  }
  for (const auto& [text, status] : refused) {
    if (!possible.contains(text)) return status;
  }
  for (const Unit& unit : UnitsOf(plan)) {
    const absl::Status status =
        tasks_->Sample({.task = unit.task, .length = unit.length, .depth = unit.depth}).status();
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<UnitRunner>> Evaluation::Runner(const EvaluationPlan& plan) const {
  return Session::Attach(*this, plan);
}

absl::Status Evaluation::Run(const EvaluationPlan& plan, const RunOptions& run,
                             const Listener& listener) {
  if (absl::Status status = CheckPlan(plan); !status.ok()) return status;
  const std::vector<Unit> units = UnitsOf(plan);
  std::mutex mutex;
  std::deque<std::size_t> left;  // guarded by the mutex, as is `result`
  absl::Status result;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (!run.except.contains(i)) left.push_back(i);
  }
  const auto work = [&] {
    const absl::StatusOr<std::unique_ptr<UnitRunner>> runner =
        run.start ? run.start() : Runner(plan);
    std::unique_lock<std::mutex> lock(mutex);
    if (!runner.ok()) result.Update(runner.status());
    while (result.ok() && !left.empty()) {
      const std::size_t next = left.front();
      left.pop_front();
      lock.unlock();
      const absl::StatusOr<FinishedUnit> finished = (*runner)->Run(next, [&] {
        const std::lock_guard<std::mutex> guard(mutex);
        listener.answered(units[next]);
      });
      lock.lock();
      result.Update(finished.ok() ? listener.finished(*finished) : finished.status());
    }
  };
  std::vector<std::thread> others;
  for (std::uint32_t i = 1; i < std::min<std::size_t>(run.runners, left.size()); ++i) {
    others.emplace_back(work);
  }
  work();
  for (std::thread& other : others) other.join();
  return result;
}

}  // namespace tessera::cli::eval
