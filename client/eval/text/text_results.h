// The plan of an evaluation with a language model, and its figures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client/eval/plan.h"

namespace tessera::cli::eval {

// Stands among the policies for a yardstick that is no policy: the model's own cache rounded to fp8
// (e4m3), one scale per lane and side (Fp8Cache).
inline constexpr std::string_view kFp8Yardstick = "fp8";

struct TextPlan {
  std::vector<PolicyAt> policies;
  std::vector<std::uint32_t> lengths;  // tokens that are compressed
  std::vector<std::uint32_t> needles;  // numbers of needles in a text
  std::vector<Question> questions;     // of needles
  std::uint32_t read = 256;            // tokens read through the cache
  std::uint32_t generate = 0;          // tokens generated through it
  std::uint32_t texts = 1;             // how many, of each length
  std::uint32_t batch = 16;            // policies in a step

  bool IsYardstick(std::size_t policy) const { return policies[policy].text == kFp8Yardstick; }
  // Its index among the policies.
  std::optional<std::size_t> yardstick() const;
};

// A text at one length. Units run independently.
struct TextUnit {
  std::uint32_t length = 0;
  std::uint32_t text = 0;
};
std::vector<TextUnit> UnitsOf(const TextPlan& plan);

struct Asked {
  std::uint32_t right = 0, samples = 0;
  void Add(const Asked& other) {
    right += other.right;
    samples += other.samples;
  }
};

// What one policy did with one text.
struct TextOutcome {
  std::string refused;     // the daemon's reason; empty: it was measured
  std::string not_packed;  // why a policy that packs packed nothing
  double bytes_kept = 0;   // share of the dense context's bytes
  // Of the tokens read through the cache. Differences of -ln p of the text's token to exact
  // attention, as means of blocks of 32 tokens: neighbours depend on each other.
  std::vector<double> differences;
  double divergence = 0;    // mean KL divergence from exact attention to this, in nats
  double same_choice = 0;   // share of tokens with the same likeliest token
  double step_ms = 0;       // median time of a step of one token
  double cache_ms = 0;      // of it spent in Tessera
  double agreement = 0;     // share of generated tokens that are those of dense
  double agreed_until = 0;  // generated tokens before the first other one
  // Mean KL divergence from exact attention over the prompt and the generated text, in nats.
  double generated_divergence = 0;
  // By index of `needles` and `questions`.
  std::vector<std::vector<Asked>> asked;
};

struct FinishedText {
  std::vector<TextOutcome> outcomes;  // by policy; empty: not finished
};

// A mean with the half width of its 95 % confidence interval.
struct Estimate {
  double mean = 0, half = 0;
};

// The figures of a policy at a length, over all texts that it was measured on.
struct TextFigures {
  std::uint32_t texts = 0;
  std::string refused, not_packed;  // the first reason
  double bytes_kept = 0, divergence = 0, same_choice = 0, step_ms = 0, cache_ms = 0;
  double agreement = 0, agreed_until = 0, generated_divergence = 0;
  Estimate difference;
  std::vector<std::vector<Asked>> asked;
};

class TextResults {
 public:
  explicit TextResults(TextPlan plan)
      : plan_(std::move(plan)), units_(UnitsOf(plan_)), finished_(units_.size()) {}

  const TextPlan& plan() const { return plan_; }
  const std::vector<TextUnit>& units() const { return units_; }
  void Add(std::size_t unit, FinishedText finished) { finished_[unit] = std::move(finished); }
  TextFigures Of(std::size_t policy, std::uint32_t length) const;

 private:
  const TextPlan plan_;
  const std::vector<TextUnit> units_;
  std::vector<FinishedText> finished_;
};

// Student's t interval of the mean. No interval of fewer than two values: half is 0.
Estimate EstimateOf(const std::vector<double>& values);

}  // namespace tessera::cli::eval
