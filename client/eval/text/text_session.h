// One worker of a text evaluation.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/compressed_fork.h"
#include "client/eval/text/fp8_cache.h"
#include "client/eval/text/needles.h"
#include "client/eval/text/text_results.h"
#include "client/model/generate.h"
#include "client/model/model.h"
#include "tessera/worker.h"

namespace tessera::cli::eval {

class TextSession {
 public:
  // The arguments must outlive the object.
  static absl::StatusOr<std::unique_ptr<TextSession>> Attach(const client::AttachOptions& options,
                                                             const llm::Model& model,
                                                             const llm::Tokenizer& tokenizer,
                                                             const TextPlan& plan);

  // INVALID_ARGUMENT if the daemon refuses the policy.
  absl::Status Try(const std::string& policy);
  absl::StatusOr<FinishedText> Run(const TextUnit& unit, std::span<const llm::TokenId> text);

 private:
  using Tokens = std::span<const llm::TokenId>;
  struct Fork {
    std::size_t policy;
    CompressedForks::Fork of;
  };
  // A batch of forks under consecutive policies. Refusals are noted in `finished`.
  using WithForks = std::function<absl::Status(std::vector<Fork>& forks)>;

  TextSession(const llm::Model& model, const llm::Tokenizer& tokenizer, const TextPlan& plan)
      : model_(model), tokenizer_(tokenizer), plan_(plan) {}

  absl::StatusOr<std::vector<float>> Compute(Tokens tokens, std::uint64_t first, bool all_logits,
                                             llm::Attention& attention) const;
  absl::Status ForEachBatch(const PromptRows& rows, Tokens prompt, std::uint32_t length,
                            FinishedText& finished, const WithForks& use);
  absl::Status Read(const TextUnit& unit, Tokens text, FinishedText& finished);
  absl::Status ReadThrough(Tokens tokens, std::span<const float> exact, std::vector<Fork>& forks,
                           FinishedText& finished);
  absl::Status ReadYardstick(const PromptRows& rows, Tokens tokens, std::span<const float> exact,
                             FinishedText& finished) const;
  absl::Status GenerateThrough(llm::TokenId next, const PromptRows& rows, std::vector<Fork>& forks,
                               bool with_yardstick, FinishedText& finished);
  absl::Status Ask(const TextUnit& unit, Tokens text, std::size_t needles, FinishedText& finished);
  absl::StatusOr<bool> Answers(client::Sequence& sequence, Tokens question, Tokens answer);
  absl::StatusOr<bool> Answers(Fp8Cache cache, std::uint64_t first, Tokens question,
                               Tokens answer) const;

  const llm::Model& model_;
  const llm::Tokenizer& tokenizer_;
  const TextPlan& plan_;
  std::unique_ptr<client::Worker> worker_;
  client::Model registered_;
};

}  // namespace tessera::cli::eval
