#include "client/eval/text/text_evaluation.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

absl::StatusOr<std::unique_ptr<TextEvaluation>> TextEvaluation::Open(const Options& options) {
  std::unique_ptr<TextEvaluation> evaluation(new TextEvaluation(options));
  absl::StatusOr<std::unique_ptr<llm::Tokenizer>> tokenizer = llm::ReadTokenizer(options.model);
  if (!tokenizer.ok()) return tokenizer.status();
  evaluation->tokenizer_ = *std::move(tokenizer);
  for (const EvaluationText& text : options.texts) {
    if (evaluation->names_.size() == options.max_texts) break;
    absl::StatusOr<std::vector<llm::TokenId>> tokens = evaluation->tokenizer_->Encode(text.text);
    if (!tokens.ok()) return tokens.status();
    if (tokens->size() < options.min_tokens) continue;
    evaluation->names_.push_back(text.path);
    evaluation->tokens_.push_back(*std::move(tokens));
  }
  if (evaluation->names_.empty()) {
    return absl::NotFoundError(
        Concat("none of ", options.texts.size(), " texts has ", options.min_tokens,
               " tokens; name longer ones with --texts, or lower --lengths"));
  }
  absl::StatusOr<std::unique_ptr<llm::Model>> model = llm::Model::Load(options.model);
  if (!model.ok()) return model.status();
  evaluation->model_ = *std::move(model);
  if (options.min_tokens > evaluation->model_->config().max_positions) {
    return absl::InvalidArgumentError(
        Concat("--lengths: ", options.min_tokens, " tokens with those that follow; the model's ",
               "limit is ", evaluation->model_->config().max_positions));
  }
  return evaluation;
}

std::uint64_t TextEvaluation::dense_bytes_per_token() const {
  const llm::Config& config = model_->config();
  return std::uint64_t{2} * config.layers * config.kv_row() * sizeof(std::uint16_t);
}

absl::Status TextEvaluation::CheckPolicies(const TextPlan& plan) const {
  const auto session = Attach(plan);
  if (!session.ok()) return session.status();
  for (std::size_t i = 0; i < plan.policies.size(); ++i) {
    if (plan.IsYardstick(i)) continue;
    for (const std::uint32_t length : plan.lengths) {
      const std::string text = plan.policies[i].For(length);
      const absl::Status status = (*session)->Try(text);
      if (status.ok()) continue;
      return absl::Status(status.code(), Concat(text, ": ", AsStringView(status.message())));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<TextSession>> TextEvaluation::Attach(const TextPlan& plan) const {
  return TextSession::Attach({.address = options_.address,
                              .device = options_.device,
                              .tls = options_.tls,
                              .worker_name = "eval",
                              // The table says it (TextOutcome::not_packed).
                              .on_warning = [](std::string_view) {}},
                             *model_, *tokenizer_, plan);
}

absl::Status TextEvaluation::Run(TextResults& results, std::uint32_t threads,
                                 const std::function<void()>& finished) const {
  if (absl::Status status = CheckPolicies(results.plan()); !status.ok()) return status;
  std::mutex mutex;
  std::size_t next = 0;  // guarded by the mutex, as are `status` and `results`
  absl::Status status;
  const auto work = [&] {
    const auto session = Attach(results.plan());
    std::unique_lock<std::mutex> lock(mutex);
    if (!session.ok()) status.Update(session.status());
    while (status.ok() && next < results.units().size()) {
      const std::size_t unit = next++;
      lock.unlock();
      absl::StatusOr<FinishedText> text =
          (*session)->Run(results.units()[unit], tokens_[results.units()[unit].text]);
      lock.lock();
      if (text.ok()) {
        results.Add(unit, *std::move(text));
        finished();
      } else {
        status.Update(text.status());
      }
    }
  };
  std::vector<std::thread> others;
  for (std::uint32_t i = 1; i < std::min<std::size_t>(threads, results.units().size()); ++i) {
    others.emplace_back(work);
  }
  work();
  for (std::thread& other : others) other.join();
  return status;
}

}  // namespace tessera::cli::eval
