// The plan of an evaluation (samples and policies) and its outcomes.
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
// share of the text's tokens, `{tokens/2}` for half of it.
struct PolicyAt {
  std::string text;
  std::optional<double> budget;  // nullopt: the text has no placeholder

  static bool HasPlace(std::string_view text);
  // For people, independent of the length: "streaming:budget=20%".
  std::string Name() const;
  // For the daemon: "streaming:budget=204".
  std::string For(std::uint32_t length) const;

  friend bool operator==(const PolicyAt&, const PolicyAt&) = default;
};

// Blind: the question follows compression. Seen: it is compressed with the context, inside the
// window that policies observe.
enum class Question : std::uint8_t { kBlind, kSeen };
std::string_view NameOf(Question question);

struct EvaluationPlan {
  std::vector<PolicyAt> policies;
  std::vector<std::string> tasks;
  std::vector<std::uint32_t> lengths;
  std::vector<double> depths;
  std::vector<Question> questions = {Question::kBlind};
  std::uint32_t samples = 10;  // per unit
  std::uint32_t first_seed = 0;
  // Policies of one sample that decode in the same step. 1: each alone, to time its steps.
  std::uint32_t batch = 16;
};

// The samples that differ only in their seeds. Units finish as a whole.
struct Unit {
  Question question = Question::kBlind;
  std::uint32_t length = 0;
  std::string task;
  double depth = 0;
};

// Ordered by question, length, task and depth. A unit's index in this list is its number.
std::vector<Unit> UnitsOf(const EvaluationPlan& plan);

// The flags that identify a plan. Plans with equal flags give equal outcomes.
std::vector<std::pair<std::string, std::string>> FlagsOf(const EvaluationPlan& plan);

// The outcome of one policy in one unit.
struct Outcome {
  std::uint32_t right = 0;
  std::uint32_t samples = 0;
  double bytes_kept = 0;  // mean share of the dense context's bytes
  double step_ms = 0;     // mean time of a decode step of the whole batch
  // Why a policy that packs packed nothing, of the first such sample. Empty: it packed.
  std::string not_packed;
  std::string refused;  // the daemon's reason if the policy cannot meet its budget
  // One character per sample, to compare policies sample by sample: right '1', wrong '0', refused
  // '-'. Empty in files of older versions.
  std::string marks;
};

// A sample as text.
struct Example {
  std::string question;
  std::string answer;
  std::vector<std::string> answers;  // by policy; empty if refused
};

struct FinishedUnit {
  std::size_t unit = 0;
  std::vector<Outcome> outcomes;  // by policy
  Example example;                // the first sample
};

}  // namespace tessera::cli::eval
