// What an evaluation asks: which samples, under which policies; and what came out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::cli::eval {

// A policy at one budget. In its text `{}` stands for the budget as a share, `{tokens}` for that
// share of the text's tokens, `{tokens/2}` for half of those: some policies count.
struct PolicyAt {
  std::string text;
  std::optional<double> budget;  // nothing: the text has no place for one

  static bool HasPlace(std::string_view text);
  // "streaming:budget=20%", whatever the length.
  std::string Name() const;
  // What a daemon is told: "streaming:budget=204".
  std::string For(std::uint32_t length) const;

  friend bool operator==(const PolicyAt&, const PolicyAt&) = default;
};

// Whether the question is compressed with the context, within the window that policies observe, or
// comes when that has been done.
enum class Question : std::uint8_t { kBlind, kSeen };
std::string_view NameOf(Question question);

struct EvaluationPlan {
  std::vector<PolicyAt> policies;
  std::vector<std::string> tasks;
  std::vector<std::uint32_t> lengths;
  std::vector<double> depths;
  std::vector<Question> questions = {Question::kBlind};
  std::uint32_t samples = 10;  // of each unit
  std::uint32_t first_seed = 0;
  // So many policies of a sample decode in one step. 1: each alone, so that steps can be timed.
  std::uint32_t batch = 16;
};

// The samples that differ only by their seeds: what is finished, or not, as a whole.
struct Unit {
  Question question = Question::kBlind;
  std::uint32_t length = 0;
  std::string task;
  double depth = 0;
};

// In the order of questions, lengths, tasks, depths. Its place there is a unit's number.
std::vector<Unit> UnitsOf(const EvaluationPlan& plan);

// What makes two plans the same, by the flags that say so.
std::vector<std::pair<std::string, std::string>> FlagsOf(const EvaluationPlan& plan);

// Of one policy in one unit.
struct Outcome {
  std::uint32_t right = 0;
  std::uint32_t samples = 0;
  double bytes_kept = 0;  // of the context's, the mean; 1: nothing was compressed
  double step_ms = 0;     // the mean of decode steps, shared with the rest of the batch
  // Why a policy that packs has packed nothing, of the first sample where that was so.
  std::string not_packed;
  std::string refused;  // the daemon's reason, where the policy cannot meet its budget
  // A letter for each sample of the unit, so that policies can be compared sample by sample: right
  // '1', wrong '0', refused '-'. Empty in what an older version wrote.
  std::string marks;
};

// A sample in words.
struct Example {
  std::string question;
  std::string answer;
  std::vector<std::string> answers;  // by policy; empty where it refused
};

struct FinishedUnit {
  std::size_t unit = 0;
  std::vector<Outcome> outcomes;  // by policy
  Example example;                // the first sample
};

}  // namespace tessera::cli::eval
