#include "client/eval/plan.h"

#include <cmath>

#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

constexpr std::string_view kShare = "{}", kTokens = "{tokens}", kHalf = "{tokens/2}";

void Replace(std::string& text, std::string_view place, const std::string& with) {
  for (std::size_t at = text.find(place); at != std::string::npos; at = text.find(place, at)) {
    text.replace(at, place.size(), with);
    at += with.size();
  }
}

std::string Percent(double share) { return Concat(std::round(share * 1e4) / 100, "%"); }

std::string Count(double tokens) {
  return Concat(std::max<std::uint64_t>(1, static_cast<std::uint64_t>(tokens + 1e-9)));
}

template <typename Items, typename ToText>
std::string Joined(const Items& items, std::string_view between, const ToText& to_text) {
  std::string text;
  for (const auto& item : items) Append(text, text.empty() ? "" : between, to_text(item));
  return text;
}

}  // namespace

bool PolicyAt::HasPlace(std::string_view text) {
  for (const std::string_view place : {kShare, kTokens, kHalf}) {
    if (text.find(place) != std::string_view::npos) return true;
  }
  return false;
}

std::string PolicyAt::Name() const {
  std::string name = text;
  Replace(name, kShare, Concat(budget.value_or(1)));
  Replace(name, kTokens, Percent(budget.value_or(1)));
  Replace(name, kHalf, Percent(budget.value_or(1) / 2));
  return name;
}

std::string PolicyAt::For(std::uint32_t length) const {
  std::string policy = text;
  Replace(policy, kShare, Concat(budget.value_or(1)));
  Replace(policy, kTokens, Count(budget.value_or(1) * length));
  Replace(policy, kHalf, Count(budget.value_or(1) * length / 2));
  return policy;
}

std::string_view NameOf(Question question) {
  return question == Question::kBlind ? "blind" : "seen";
}

std::vector<Unit> UnitsOf(const EvaluationPlan& plan) {
  std::vector<Unit> units;
  for (const Question question : plan.questions) {
    for (const std::uint32_t length : plan.lengths) {
      for (const std::string& task : plan.tasks) {
        for (const double depth : plan.depths) {
          units.push_back({.question = question, .length = length, .task = task, .depth = depth});
        }
      }
    }
  }
  return units;
}

std::vector<std::pair<std::string, std::string>> FlagsOf(const EvaluationPlan& plan) {
  const auto as_it_is = [](const auto& item) { return Concat(item); };
  return {
      {"policies", Joined(plan.policies, " ", [](const PolicyAt& p) { return p.Name(); })},
      {"tasks", Joined(plan.tasks, ",", as_it_is)},
      {"lengths", Joined(plan.lengths, ",", as_it_is)},
      {"depths", Joined(plan.depths, ",", as_it_is)},
      {"question", Joined(plan.questions, ",", NameOf)},
      {"samples", Concat(plan.samples)},
      {"seed", Concat(plan.first_seed)},
      {"batch", Concat(plan.batch)},
  };
}

}  // namespace tessera::cli::eval
