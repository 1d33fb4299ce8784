// Any text gives a valid policy, or an error with a message.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/grammar/validate.h"
#include "tests/unit/policies/random_policy.h"
#include "tests/unit/policies/same.h"

namespace tessera::policies {
namespace {

// Returns the number of accepted texts.
int CheckText(const std::string& text) {
  const absl::StatusOr<Policy> policy = ParsePolicy(text);
  if (!policy.ok()) {
    const std::string_view message = AsStringView(policy.status().message());
    EXPECT_TRUE(policy.status().code() == absl::StatusCode::kInvalidArgument ||
                policy.status().code() == absl::StatusCode::kUnimplemented)
        << policy.status();
    EXPECT_TRUE(message.starts_with("policy")) << message;
    EXPECT_GT(message.size(), std::string_view("policy, character 1: ").size()) << text;
    EXPECT_LT(message.size(), 2 * kMaxPolicyText);
    EXPECT_TRUE(std::ranges::all_of(message, [](char c) { return c >= ' ' && c <= '~'; }))
        << message;
    return 0;
  }
  EXPECT_TRUE(Validate(*policy).ok()) << text;
  const absl::StatusOr<Policy> again = ParsePolicy(policy->text);
  EXPECT_TRUE(again.ok() && Same(*policy, *again)) << text << " became " << policy->text;
  return 1;
}

TEST(Fuzz, RandomBytes) {
  TestRandom random;
  for (int round = 0; round < 20000 && !testing::Test::HasFailure(); ++round) {
    std::string text(random.Below(random.OneIn(20) ? 1200 : 40), '\0');
    for (char& c : text) c = static_cast<char>(random.Bits());
    CheckText(text);
  }
}

TEST(Fuzz, RandomWordsOfTheGrammar) {
  TestRandom random;
  std::vector<std::string> words = {"+", ":",  ",",   "=", "|",     " ",
                                    "%", "0",  "1",   ".", "e-3",   "64K",
                                    "-", "\t", "25%", "M", "1e400", "99999999999999999999"};
  for (const TermKind* kind : TermKinds()) {
    words.emplace_back(kind->name);
    for (const Option& option : kind->options) {
      words.push_back(Concat(option.name, "="));
      words.emplace_back(option.standard);
    }
  }
  for (int round = 0; round < 50000 && !testing::Test::HasFailure(); ++round) {
    std::string text;
    for (std::uint64_t i = random.Below(random.OneIn(50) ? 400 : 12); i > 0; --i) {
      text += random.Pick(words);
    }
    CheckText(text);
  }
}

void Mutate(TestRandom& random, std::string& text) {
  constexpr std::string_view kCharacters = "+:,=|% .0123456789KMeabkn-\n\x01\xff";
  const std::size_t at = random.Below(text.size() + 1);
  switch (random.Below(5)) {
    case 0:
      text.insert(at, 1, random.Pick(kCharacters));
      break;
    case 1:
      text.erase(at, random.Between(1, 3));
      break;
    case 2:
      if (at < text.size()) text[at] = random.Pick(kCharacters);
      break;
    case 3:  // repeats a part elsewhere
      text.insert(random.Below(text.size() + 1), text.substr(at, random.Below(20)));
      break;
    default:
      if (at + 1 < text.size()) std::swap(text[at], text[at + 1]);
      break;
  }
}

TEST(Fuzz, MutatedWords) {
  TestRandom random;
  PolicyWords words(random, /*few=*/false);
  int accepted = 0;
  for (int round = 0; round < 50000 && !testing::Test::HasFailure(); ++round) {
    std::string text = words.Spell(words.Next());
    for (std::uint64_t i = random.Between(1, 3); i > 0; --i) Mutate(random, text);
    accepted += CheckText(text);
  }
  EXPECT_GT(accepted, 300);  // makes sure that enough are accepted
}

}  // namespace
}  // namespace tessera::policies
