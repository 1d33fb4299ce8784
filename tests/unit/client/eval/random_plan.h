// Plausible plans and outcomes, for tests of their processing.
#pragma once

#include <string>

#include "client/eval/plan.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::eval {

inline EvaluationPlan RandomPlan(TestRandom& random) {
  EvaluationPlan plan = {.policies = {{.text = "dense"}},
                         .tasks = {"niah_single"},
                         .lengths = {512},
                         .depths = {0.5},
                         .samples = static_cast<std::uint32_t>(random.Between(1, 20)),
                         .first_seed = static_cast<std::uint32_t>(random.Bits() >> 33)};
  for (const double budget : {0.1, 0.2, 0.35}) {
    plan.policies.push_back({.text = "chunkkv:budget={}", .budget = budget});
    plan.policies.push_back({.text = "streaming:budget={tokens}", .budget = budget});
    plan.policies.push_back({.text = "chunkkv:budget={}+mosaickv:keep=0.5", .budget = budget});
  }
  if (random.OneIn(2)) plan.tasks.push_back("vt2");
  if (random.OneIn(2)) plan.lengths.push_back(1024);
  if (random.OneIn(2)) plan.depths = {0, 1.0 / 3, 1};
  if (random.OneIn(2)) plan.questions.push_back(Question::kSeen);
  if (random.OneIn(4)) plan.batch = 1;
  return plan;
}

inline FinishedUnit RandomUnit(TestRandom& random, const EvaluationPlan& plan, std::size_t unit) {
  FinishedUnit finished = {.unit = unit};
  for (std::size_t i = 0; i < plan.policies.size(); ++i) {
    Outcome outcome;
    if (random.OneIn(8)) {
      outcome.refused = "no \"tau\" <leaves> less\n";
    } else {
      for (std::uint32_t sample = 0; sample < plan.samples; ++sample) {
        outcome.marks += "10-"[random.Below(3)];
        outcome.right += outcome.marks.back() == '1' ? 1 : 0;
        outcome.samples += outcome.marks.back() != '-' ? 1 : 0;
      }
      outcome = {.right = outcome.right,
                 .samples = outcome.samples,
                 .bytes_kept = static_cast<double>(random.Between(1, 1'000'000)) / 999'999,
                 .step_ms = static_cast<double>(random.Below(1000)) / 7,
                 .not_packed = random.OneIn(4) ? "left dense: \"too\" short\n" : "",
                 .refused = "",
                 .marks = outcome.marks};
    }
    finished.outcomes.push_back(outcome);
  }
  if (random.OneIn(2)) {
    finished.example = {.question = "what \"is\" it ?", .answer = "4 2 ."};
    finished.example.answers.resize(plan.policies.size());
    for (std::string& answer : finished.example.answers) {
      if (!random.OneIn(4)) answer = std::to_string(random.Below(100)) + " .\n";
    }
  }
  return finished;
}

}  // namespace tessera::cli::eval
