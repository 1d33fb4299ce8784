#include "client/eval/text/text_session.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/status/status.h"
#include "client/eval/text/distribution.h"
#include "client/eval/text/fp8_cache.h"
#include "client/eval/text/generation.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

constexpr std::uint32_t kBlock = 32;  // tokens of one difference
// The last tokens of a reading are read by each policy alone, for the times.
constexpr std::uint32_t kTimedTokens = 16;

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Figures of one policy while it reads.
struct Reading {
  std::vector<double> differences, step_ms, cache_ms;
  double divergence = 0;
  std::uint32_t same = 0;

  void Add(std::span<const float> exact, std::span<const float> other, llm::TokenId next) {
    const double exact_sum = LogSum(exact), other_sum = LogSum(other);
    differences.push_back((other_sum - other[next]) - (exact_sum - exact[next]));
    divergence += Divergence(exact, exact_sum, other, other_sum);
    same += Likeliest(exact) == Likeliest(other) ? 1 : 0;
  }
  void WriteTo(TextOutcome& outcome) const {
    const auto count = static_cast<double>(differences.size());
    outcome.differences.clear();
    for (std::size_t first = 0; first < differences.size(); first += kBlock) {
      const std::size_t end = std::min<std::size_t>(differences.size(), first + kBlock);
      const double sum =
          std::accumulate(differences.begin() + static_cast<std::ptrdiff_t>(first),
                          differences.begin() + static_cast<std::ptrdiff_t>(end), 0.0);
      outcome.differences.push_back(sum / static_cast<double>(end - first));
    }
    outcome.divergence = divergence / count;
    outcome.same_choice = same / count;
    outcome.step_ms = Median(step_ms);
    outcome.cache_ms = Median(cache_ms);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<TextSession>> TextSession::Attach(
    const client::AttachOptions& options, const llm::Model& model, const llm::Tokenizer& tokenizer,
    const TextPlan& plan) {
  std::unique_ptr<TextSession> session(new TextSession(model, tokenizer, plan));
  absl::StatusOr<std::unique_ptr<client::Worker>> worker = client::Worker::Attach(options);
  if (!worker.ok()) return worker.status();
  session->worker_ = *std::move(worker);
  absl::StatusOr<client::Model> registered = session->worker_->RegisterModel(
      llm::GeometryOf(model.config(), "eval-text", tokenizer.delimiters()));
  if (!registered.ok()) return registered.status();
  session->registered_ = *std::move(registered);
  return session;
}

absl::Status TextSession::Try(const std::string& policy) {
  return worker_->CreateSequence(registered_, policy).status();
}

// The logits of all tokens, or none.
absl::StatusOr<std::vector<float>> TextSession::Compute(Tokens tokens, std::uint64_t first,
                                                        bool all_logits,
                                                        llm::Attention& attention) const {
  std::vector<std::uint32_t> positions(tokens.size()), all(all_logits ? tokens.size() : 0);
  std::iota(positions.begin(), positions.end(), static_cast<std::uint32_t>(first));
  std::iota(all.begin(), all.end(), 0);
  return model_.Forward({.tokens = tokens, .positions = positions, .logits_of = all}, attention);
}

absl::Status TextSession::ForEachBatch(const PromptRows& rows, Tokens prompt, std::uint32_t length,
                                       FinishedText& finished, const WithForks& use) {
  absl::StatusOr<CompressedForks> compressed =
      CompressedForks::Create(rows, prompt, *worker_, registered_);
  if (!compressed.ok()) return compressed.status();
  std::vector<Fork> forks;
  for (std::size_t policy = 0; policy < plan_.policies.size(); ++policy) {
    if (!plan_.IsYardstick(policy)) {
      absl::StatusOr<CompressedForks::Fork> fork =
          compressed->Compress(plan_.policies[policy].For(length));
      if (fork.ok()) {
        forks.push_back({policy, *std::move(fork)});
      } else if (absl::IsInvalidArgument(fork.status())) {
        finished.outcomes[policy].refused = std::string(AsStringView(fork.status().message()));
      } else {
        return fork.status();
      }
    }
    if (forks.size() < plan_.batch && policy + 1 < plan_.policies.size()) continue;
    if (absl::Status status = use(forks); !status.ok()) return status;
    forks.clear();
  }
  return absl::OkStatus();
}

absl::StatusOr<FinishedText> TextSession::Run(const TextUnit& unit, Tokens text) {
  FinishedText finished;
  finished.outcomes.resize(plan_.policies.size());
  for (TextOutcome& outcome : finished.outcomes) {
    outcome.asked.assign(plan_.needles.size(), std::vector<Asked>(plan_.questions.size()));
  }
  if (absl::Status status = Read(unit, text, finished); !status.ok()) return status;
  for (std::size_t needles = 0; needles < plan_.needles.size(); ++needles) {
    if (absl::Status status = Ask(unit, text, needles, finished); !status.ok()) return status;
  }
  return finished;
}

absl::Status TextSession::Read(const TextUnit& unit, Tokens text, FinishedText& finished) {
  PromptRows rows(model_.config());
  const Tokens prompt = text.first(unit.length);
  const Tokens read = text.subspan(unit.length, plan_.read + 1);
  absl::Status status = Compute(prompt, 0, false, rows).status();
  if (!status.ok()) return status;
  const absl::StatusOr<std::vector<float>> exact =
      Compute(read.first(plan_.read), unit.length, true, rows);
  if (!exact.ok()) return exact.status();
  rows.Truncate(unit.length);
  if (plan_.yardstick().has_value()) {
    absl::Status measured = ReadYardstick(rows, read, *exact, finished);
    if (!measured.ok()) return measured;
  }
  bool first_batch = true;
  return ForEachBatch(rows, prompt, unit.length, finished, [&](std::vector<Fork>& forks) {
    // Generation starts from forks of the compressed sequences, before they read on.
    std::vector<Fork> others;
    for (Fork& fork : forks) {
      if (plan_.generate == 0) break;
      absl::StatusOr<client::Sequence> other = fork.of.sequence.Fork();
      if (!other.ok()) return other.status();
      others.push_back({fork.policy, {.sequence = *std::move(other)}});
    }
    absl::Status done = ReadThrough(read, *exact, forks, finished);
    if (done.ok() && plan_.generate > 0) {
      done = GenerateThrough(read[0], rows, others, first_batch, finished);
    }
    first_batch = false;
    return done;
  });
}

// Reading all tokens at once gives what reading them one by one does.
absl::Status TextSession::ReadYardstick(const PromptRows& rows, Tokens tokens,
                                        std::span<const float> exact,
                                        FinishedText& finished) const {
  const std::size_t vocabulary = model_.config().vocabulary;
  Fp8Cache cache(model_.config(), rows);
  TextOutcome& outcome = finished.outcomes[*plan_.yardstick()];
  outcome.bytes_kept = cache.bytes_kept();
  const absl::StatusOr<std::vector<float>> logits =
      Compute(tokens.first(plan_.read), rows.tokens(), true, cache);
  if (!logits.ok()) return logits.status();
  Reading reading;
  for (std::uint32_t token = 0; token < plan_.read; ++token) {
    reading.Add(exact.subspan(token * vocabulary, vocabulary),
                std::span(*logits).subspan(token * vocabulary, vocabulary), tokens[token + 1]);
  }
  reading.WriteTo(outcome);
  return absl::OkStatus();
}

absl::Status TextSession::ReadThrough(Tokens tokens, std::span<const float> exact,
                                      std::vector<Fork>& forks, FinishedText& finished) {
  const std::size_t vocabulary = model_.config().vocabulary;
  const std::uint32_t together = plan_.read - std::min(plan_.read, kTimedTokens);
  std::vector<Reading> readings(forks.size());
  const auto add = [&](std::size_t fork, std::size_t token, std::span<const float> logits) {
    readings[fork].Add(exact.subspan(token * vocabulary, vocabulary), logits, tokens[token + 1]);
  };
  for (std::uint32_t token = 0; token < together && !forks.empty(); ++token) {
    std::vector<llm::Turn> turns;
    for (Fork& fork : forks) turns.push_back({&fork.of.sequence, tokens.subspan(token, 1)});
    const absl::StatusOr<std::vector<float>> logits = llm::Advance(model_, *worker_, turns);
    if (!logits.ok()) return logits.status();
    for (std::size_t i = 0; i < forks.size(); ++i) {
      add(i, token, std::span(*logits).subspan(i * vocabulary, vocabulary));
    }
  }
  for (std::size_t i = 0; i < forks.size(); ++i) {
    for (std::uint32_t token = together; token < plan_.read; ++token) {
      const llm::Turn turn[] = {{&forks[i].of.sequence, tokens.subspan(token, 1)}};
      const auto begun = std::chrono::steady_clock::now();
      double cache_seconds = 0;
      const absl::StatusOr<std::vector<float>> logits =
          llm::Advance(model_, *worker_, turn, &cache_seconds);
      if (!logits.ok()) return logits.status();
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begun;
      readings[i].step_ms.push_back(1e3 * spent.count());
      readings[i].cache_ms.push_back(1e3 * cache_seconds);
      add(i, token, *logits);
    }
    TextOutcome& outcome = finished.outcomes[forks[i].policy];
    readings[i].WriteTo(outcome);
    outcome.bytes_kept = forks[i].of.bytes_kept;
    outcome.not_packed = forks[i].of.not_packed;
  }
  return absl::OkStatus();
}

absl::Status TextSession::GenerateThrough(llm::TokenId next, const PromptRows& rows,
                                          std::vector<Fork>& forks, bool with_yardstick,
                                          FinishedText& finished) {
  absl::StatusOr<client::Sequence> dense = worker_->CreateSequence(registered_, "dense");
  if (!dense.ok()) return dense.status();
  if (absl::Status appended = rows.AppendTo(*dense); !appended.ok()) return appended;
  std::optional<Fp8Cache> yardstick;
  if (with_yardstick && plan_.yardstick().has_value()) yardstick.emplace(model_.config(), rows);
  std::vector<client::Sequence*> batch = {&*dense};
  std::vector<std::size_t> policies;
  for (Fork& fork : forks) {
    batch.push_back(&fork.of.sequence);
    policies.push_back(fork.policy);
  }
  if (yardstick.has_value()) policies.push_back(*plan_.yardstick());
  const absl::StatusOr<std::vector<GeneratedText>> texts =
      Generate({model_, *worker_, rows, next, plan_.generate}, batch,
               yardstick.has_value() ? &*yardstick : nullptr);
  if (!texts.ok()) return texts.status();
  const std::vector<llm::TokenId>& expected = texts->front().tokens;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    const GeneratedText& text = (*texts)[i + 1];
    TextOutcome& outcome = finished.outcomes[policies[i]];
    const auto first = std::ranges::mismatch(text.tokens, expected).in1 - text.tokens.begin();
    outcome.agreed_until = static_cast<double>(first);
    std::uint32_t same = 0;
    for (std::size_t at = 0; at < expected.size(); ++at) {
      same += text.tokens[at] == expected[at] ? 1 : 0;
    }
    outcome.agreement = same / static_cast<double>(plan_.generate);
    outcome.generated_divergence = text.divergence;
  }
  return absl::OkStatus();
}

// Whether the likeliest tokens after the question are the answer. Feeding the answer's tokens one
// by one gives the same as generating: after a wrong one nothing counts.
absl::StatusOr<bool> TextSession::Answers(client::Sequence& sequence, Tokens question,
                                          Tokens answer) {
  for (std::size_t i = 0; i < answer.size(); ++i) {
    const llm::Turn turn[] = {{&sequence, i == 0 ? question : answer.subspan(i - 1, 1)}};
    const absl::StatusOr<std::vector<float>> logits = llm::Advance(model_, *worker_, turn);
    if (!logits.ok()) return logits.status();
    if (Likeliest(*logits) != answer[i]) return false;
  }
  return true;
}

// The same with the yardstick.
absl::StatusOr<bool> TextSession::Answers(Fp8Cache cache, std::uint64_t first, Tokens question,
                                          Tokens answer) const {
  std::vector<llm::TokenId> tokens(question.begin(), question.end());
  tokens.insert(tokens.end(), answer.begin(), answer.end() - 1);
  const absl::StatusOr<std::vector<float>> logits = Compute(tokens, first, true, cache);
  if (!logits.ok()) return logits.status();
  const std::size_t vocabulary = model_.config().vocabulary;
  for (std::size_t i = 0; i < answer.size(); ++i) {
    const std::size_t at = (question.size() - 1 + i) * vocabulary;
    if (Likeliest(std::span(*logits).subspan(at, vocabulary)) != answer[i]) return false;
  }
  return true;
}

absl::Status TextSession::Ask(const TextUnit& unit, Tokens text, std::size_t needles,
                              FinishedText& finished) {
  const std::uint32_t count = plan_.needles[needles];
  const absl::StatusOr<NeedleText> hidden =
      HideNeedles(tokenizer_, text, unit.length, count, 1000 * unit.text + count);
  if (!hidden.ok()) return hidden.status();
  PromptRows rows(model_.config());
  absl::Status status = Compute(hidden->context, 0, false, rows).status();
  for (std::size_t q = 0; status.ok() && q < plan_.questions.size(); ++q) {
    const bool is_seen = plan_.questions[q] == Question::kSeen;
    const auto answered = [&](std::size_t policy, bool right) {
      finished.outcomes[policy].asked[needles][q].Add({right ? 1u : 0u, 1});
    };
    if (!is_seen) {
      for (const NeedleText::Question& question : hidden->questions) {
        if (!plan_.yardstick().has_value()) break;
        const auto right = Answers(Fp8Cache(model_.config(), rows), unit.length, question.question,
                                   question.answer);
        if (!right.ok()) return right.status();
        answered(*plan_.yardstick(), *right);
      }
      status = ForEachBatch(
          rows, hidden->context, unit.length, finished,
          [&](std::vector<Fork>& forks) -> absl::Status {
            for (Fork& fork : forks) {
              for (const NeedleText::Question& question : hidden->questions) {
                absl::StatusOr<client::Sequence> sequence = fork.of.sequence.Fork();
                if (!sequence.ok()) return sequence.status();
                const auto right = Answers(*sequence, question.question, question.answer);
                if (!right.ok()) return right.status();
                answered(fork.policy, *right);
              }
            }
            return absl::OkStatus();
          });
      continue;
    }
    // Compressing with the question costs as much as compressing the text: one question per text.
    const NeedleText::Question& question = hidden->questions[unit.text % count];
    const Tokens before = Tokens(question.question).first(question.question.size() - 1);
    std::vector<llm::TokenId> prompt = hidden->context;
    prompt.insert(prompt.end(), before.begin(), before.end());
    status = Compute(before, unit.length, false, rows).status();
    if (!status.ok()) break;
    if (plan_.yardstick().has_value()) {
      const auto right = Answers(Fp8Cache(model_.config(), rows), prompt.size(),
                                 Tokens(question.question).last(1), question.answer);
      if (!right.ok()) return right.status();
      answered(*plan_.yardstick(), *right);
    }
    status = ForEachBatch(
        rows, prompt, unit.length, finished, [&](std::vector<Fork>& forks) -> absl::Status {
          for (Fork& fork : forks) {
            const auto right =
                Answers(fork.of.sequence, Tokens(question.question).last(1), question.answer);
            if (!right.ok()) return right.status();
            answered(fork.policy, *right);
          }
          return absl::OkStatus();
        });
    rows.Truncate(unit.length);
  }
  return status;
}

}  // namespace tessera::cli::eval
