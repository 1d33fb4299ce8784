#include "client/model/generate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "absl/status/status.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

namespace {

// A token can only be chosen from finite logits.
absl::Status CheckFinite(std::span<const float> logits, std::size_t vocabulary) {
  const auto is_finite = [](float logit) { return std::isfinite(logit); };
  const auto bad = std::ranges::find_if_not(logits, is_finite);
  if (bad == logits.end()) return absl::OkStatus();
  return absl::DataLossError(Concat("the logit of token ",
                                    static_cast<std::size_t>(bad - logits.begin()) % vocabulary,
                                    " is ", *bad, "; no token can be chosen"));
}

// The turns of a batch, concatenated.
struct Batch {
  std::vector<client::Sequence*> sequences;
  std::vector<std::uint32_t> counts;  // tokens of each sequence
  std::vector<TokenId> tokens;
  std::vector<std::uint32_t> last;  // index of each sequence's last token in `tokens`
};

class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds) {}
  ~Stopwatch() {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begun_;
    if (seconds_ != nullptr) *seconds_ += spent.count();
  }

 private:
  double* const seconds_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

// Measures another attention.
class TimedAttention final : public Attention {
 public:
  TimedAttention(Attention& attention, double* seconds)
      : attention_(attention), seconds_(seconds) {}
  absl::Status Attend(const LayerRows& rows, std::span<float> output) override {
    const Stopwatch stopwatch(seconds_);
    return attention_.Attend(rows, output);
  }

 private:
  Attention& attention_;
  double* const seconds_;
};

absl::StatusOr<client::Step> Begin(client::Worker& worker, const Batch& batch, double* seconds) {
  const Stopwatch stopwatch(seconds);
  return worker.BeginStep(batch.sequences, {.new_tokens_each = batch.counts});
}

absl::Status End(client::Step& step, double* seconds) {
  const Stopwatch stopwatch(seconds);
  return step.End();
}

absl::StatusOr<std::vector<float>> TryStep(const Model& model, client::Worker& worker,
                                           const Batch& batch, double* cache_seconds) {
  absl::StatusOr<client::Step> step = Begin(worker, batch, cache_seconds);
  if (!step.ok()) return step.status();
  // Read positions inside the step: a policy may change them between steps.
  std::vector<std::uint32_t> positions;
  for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
    for (std::uint32_t token = 0; token < batch.counts[i]; ++token) {
      positions.push_back(static_cast<std::uint32_t>(batch.sequences[i]->next_position()) + token);
    }
  }
  StepAttention in_step(*step);
  TimedAttention attention(in_step, cache_seconds);
  absl::StatusOr<std::vector<float>> logits = model.Forward(
      {.tokens = batch.tokens, .positions = positions, .logits_of = batch.last}, attention);
  if (!logits.ok()) return logits;
  std::vector<std::uint64_t> before;
  for (const client::Sequence* sequence : batch.sequences) before.push_back(sequence->tokens());
  // The step is committed only if End returns OK.
  if (absl::Status status = End(*step, cache_seconds); !status.ok()) return status;
  std::span<const TokenId> tokens = batch.tokens;
  for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
    absl::Status status =
        batch.sequences[i]->ObserveTokens(before[i], tokens.first(batch.counts[i]));
    if (!status.ok()) return status;
    tokens = tokens.subspan(batch.counts[i]);
  }
  return logits;
}

}  // namespace

absl::StatusOr<std::vector<float>> Prefill(const Model& model, std::span<const TokenId> prompt,
                                           client::Sequence& sequence) {
  if (prompt.empty()) return absl::InvalidArgumentError("the prompt is empty");
  if (sequence.tokens() != 0) {
    return absl::FailedPreconditionError(
        Concat("the sequence has ", sequence.tokens(), " tokens; Prefill needs an empty one"));
  }
  std::vector<std::uint32_t> positions(prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  const std::uint32_t last[] = {static_cast<std::uint32_t>(prompt.size() - 1)};
  if (absl::Status status = sequence.ObserveTokens(0, prompt); !status.ok()) return status;
  PromptAttention attention(model.config(), sequence);
  return model.Forward({.tokens = prompt, .positions = positions, .logits_of = last}, attention);
}

absl::StatusOr<std::vector<float>> Advance(const Model& model, client::Worker& worker,
                                           std::span<const Turn> turns, double* cache_seconds) {
  Batch batch;
  for (const Turn& turn : turns) {
    if (turn.tokens.empty()) return absl::InvalidArgumentError("a turn needs at least one token");
    batch.sequences.push_back(turn.sequence);
    batch.counts.push_back(static_cast<std::uint32_t>(turn.tokens.size()));
    batch.tokens.insert(batch.tokens.end(), turn.tokens.begin(), turn.tokens.end());
    batch.last.push_back(static_cast<std::uint32_t>(batch.tokens.size() - 1));
  }
  while (true) {
    absl::StatusOr<std::vector<float>> logits = TryStep(model, worker, batch, cache_seconds);
    if (!absl::IsAborted(logits.status())) return logits;
  }
}

absl::StatusOr<std::vector<std::vector<TokenId>>> Generate(
    const Model& model, client::Worker& worker, std::span<client::Sequence* const> sequences,
    std::vector<float> logits, const GenerateOptions& options) {
  const std::size_t vocabulary = model.config().vocabulary;
  TESSERA_CHECK(logits.size() == sequences.size() * vocabulary, "one row of logits per sequence");
  std::vector<std::vector<TokenId>> answers(sequences.size());
  std::vector<Sampler> samplers;
  std::vector<std::size_t> running(sequences.size());  // the sequence of each row of logits
  std::iota(running.begin(), running.end(), 0);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    SamplerOptions sampler = options.sampler;
    sampler.seed += i;
    samplers.emplace_back(sampler);
  }
  while (!running.empty() && options.max_tokens != 0) {
    if (absl::Status status = CheckFinite(logits, vocabulary); !status.ok()) return status;
    std::vector<Turn> turns;
    std::vector<std::size_t> next;
    for (std::size_t row = 0; row < running.size(); ++row) {
      const std::size_t i = running[row];
      answers[i].push_back(
          samplers[i].Choose(std::span(logits).subspan(row * vocabulary, vocabulary)));
      if (answers[i].size() == options.max_tokens || answers[i].back() == options.stop) continue;
      next.push_back(i);
      turns.push_back({.sequence = sequences[i], .tokens = std::span(answers[i]).last(1)});
    }
    running = std::move(next);
    if (turns.empty()) break;
    absl::StatusOr<std::vector<float>> advanced = Advance(model, worker, turns);
    if (!advanced.ok()) return advanced.status();
    logits = *std::move(advanced);
  }
  return answers;
}

}  // namespace tessera::llm
