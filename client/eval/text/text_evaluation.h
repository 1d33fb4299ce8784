// Measures policies with a language model: it reads on, answers and generates through a cache that
// was compressed before it knew what follows.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/text/text_results.h"
#include "client/eval/text/text_session.h"
#include "client/eval/text/texts.h"
#include "client/model/checkpoint/tokenizer.h"
#include "client/model/model.h"
#include "tessera/options.h"

namespace tessera::cli::eval {

class TextEvaluation {
 public:
  struct Options {
    std::string model;  // path
    std::string address;
    std::string device;  // as AttachOptions::device
    std::optional<client::TlsOptions> tls;
    std::vector<EvaluationText> texts;
    std::uint32_t max_texts = 0;   // of those that are long enough
    std::uint32_t min_tokens = 0;  // what a text must have
  };
  // NOT_FOUND if no text is long enough.
  static absl::StatusOr<std::unique_ptr<TextEvaluation>> Open(const Options& options);

  // Paths of the texts that are read.
  const std::vector<std::string>& texts() const { return names_; }
  // K and V of one uncompressed token, over all layers.
  std::uint64_t dense_bytes_per_token() const;

  // Checks the policies, then runs the plan's units on so many threads, each with a session of its
  // own. `finished` is called by one thread at a time.
  absl::Status Run(TextResults& results, std::uint32_t threads,
                   const std::function<void()>& finished) const;

 private:
  explicit TextEvaluation(const Options& options) : options_(options) {}
  absl::StatusOr<std::unique_ptr<TextSession>> Attach(const TextPlan& plan) const;
  absl::Status CheckPolicies(const TextPlan& plan) const;

  const Options options_;
  std::unique_ptr<llm::Model> model_;
  std::unique_ptr<llm::Tokenizer> tokenizer_;
  std::vector<std::string> names_;
  std::vector<std::vector<llm::TokenId>> tokens_;  // of each text
};

}  // namespace tessera::cli::eval
