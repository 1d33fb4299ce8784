#include "client/eval/text/generation.h"

#include <algorithm>
#include <numeric>

#include "client/eval/text/distribution.h"
#include "client/model/generate.h"

namespace tessera::cli::eval {

namespace {

// Steps whose logits are kept, to be compared at once.
constexpr std::uint32_t kCompared = 32;

std::vector<std::uint32_t> CountFrom(std::uint64_t first, std::size_t count) {
  std::vector<std::uint32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), static_cast<std::uint32_t>(first));
  return numbers;
}

// A text in the making, with exact attention over it.
class Growing {
 public:
  Growing(const llm::Model& model, const PromptRows& prompt, llm::TokenId next)
      : model_(model), exact_(prompt), next_(next) {}

  const llm::TokenId& next() const { return next_; }

  absl::Status Add(std::span<const float> logits) {
    read_.push_back(next_);
    logits_.insert(logits_.end(), logits.begin(), logits.end());
    next_ = static_cast<llm::TokenId>(Likeliest(logits));
    text_.tokens.push_back(next_);
    return read_.size() < kCompared ? absl::OkStatus() : Compare();
  }
  absl::StatusOr<GeneratedText> Finish() {
    if (absl::Status status = Compare(); !status.ok()) return status;
    text_.divergence /= static_cast<double>(std::max<std::size_t>(1, text_.tokens.size()));
    return std::move(text_);
  }

 private:
  absl::Status Compare() {
    if (read_.empty()) return absl::OkStatus();
    const absl::StatusOr<std::vector<float>> exact =
        model_.Forward({.tokens = read_,
                        .positions = CountFrom(exact_.tokens(), read_.size()),
                        .logits_of = CountFrom(0, read_.size())},
                       exact_);
    if (!exact.ok()) return exact.status();
    const std::size_t vocabulary = model_.config().vocabulary;
    for (std::size_t i = 0; i < read_.size(); ++i) {
      const auto of_exact = std::span(*exact).subspan(i * vocabulary, vocabulary);
      const auto of_cache = std::span(logits_).subspan(i * vocabulary, vocabulary);
      text_.divergence += Divergence(of_exact, LogSum(of_exact), of_cache, LogSum(of_cache));
    }
    read_.clear();
    logits_.clear();
    return absl::OkStatus();
  }

  const llm::Model& model_;
  PromptRows exact_;
  llm::TokenId next_;
  std::vector<llm::TokenId> read_;  // since the last comparison
  std::vector<float> logits_;       // after each of them
  GeneratedText text_;
};

}  // namespace

absl::StatusOr<std::vector<GeneratedText>> Generate(const GenerateTexts& what,
                                                    std::span<client::Sequence* const> sequences,
                                                    Fp8Cache* yardstick) {
  const std::size_t vocabulary = what.model.config().vocabulary;
  std::vector<Growing> growing(sequences.size() + (yardstick == nullptr ? 0 : 1),
                               Growing(what.model, what.prompt, what.next));
  for (std::uint32_t step = 0; step < what.count; ++step) {
    std::vector<llm::Turn> turns;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      turns.push_back({sequences[i], {&growing[i].next(), 1}});
    }
    if (!turns.empty()) {
      const auto logits = llm::Advance(what.model, what.worker, turns);
      if (!logits.ok()) return logits.status();
      for (std::size_t i = 0; i < sequences.size(); ++i) {
        absl::Status status =
            growing[i].Add(std::span(*logits).subspan(i * vocabulary, vocabulary));
        if (!status.ok()) return status;
      }
    }
    if (yardstick == nullptr) continue;
    const auto logits = what.model.Forward({.tokens = {&growing.back().next(), 1},
                                            .positions = CountFrom(what.prompt.tokens() + step, 1),
                                            .logits_of = CountFrom(0, 1)},
                                           *yardstick);
    if (!logits.ok()) return logits.status();
    if (absl::Status status = growing.back().Add(*logits); !status.ok()) return status;
  }
  std::vector<GeneratedText> texts;
  for (Growing& text : growing) {
    absl::StatusOr<GeneratedText> finished = text.Finish();
    if (!finished.ok()) return finished.status();
    texts.push_back(*std::move(finished));
  }
  return texts;
}

}  // namespace tessera::cli::eval
