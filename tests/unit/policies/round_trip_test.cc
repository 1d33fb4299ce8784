// Policies and texts: equal policies have one text, and a text means one policy, however it was
// spelled.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/grammar/validate.h"
#include "tests/unit/policies/random_policy.h"
#include "tests/unit/policies/same.h"

namespace tessera::policies {
namespace {

TEST(RoundTrip, TheTextOfAPolicyParsesToIt) {
  TestRandom random;
  PolicyWords words(random, /*few=*/false);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::string text = words.Spell(words.Next());
    if (text.size() > kMaxPolicyText) continue;
    const absl::StatusOr<Policy> policy = ParsePolicy(text);
    if (!policy.ok()) continue;
    ++accepted;
    ASSERT_TRUE(Validate(*policy).ok()) << text;
    ASSERT_LE(policy->text.size(), kMaxPolicyText);
    ASSERT_EQ(TextOf(*policy), policy->text) << text;
    const absl::StatusOr<Policy> again = ParsePolicy(policy->text);
    ASSERT_TRUE(again.ok()) << text << " became " << policy->text << ": " << again.status();
    ASSERT_TRUE(Same(*policy, *again)) << text << " became " << policy->text;
    ASSERT_EQ(again->text, policy->text);
  }
  EXPECT_GT(accepted, 1000);  // makes sure that enough are accepted
}

TEST(RoundTrip, SpellingDoesNotMatter) {
  TestRandom random;
  PolicyWords words(random, /*few=*/false);
  for (int round = 0; round < 10000; ++round) {
    const std::vector<GivenTerm> terms = words.Next();
    const std::string one = words.Spell(terms);
    const std::string other = words.Spell(terms);
    if (one.size() > kMaxPolicyText || other.size() > kMaxPolicyText) continue;
    const absl::StatusOr<Policy> policy = ParsePolicy(one);
    const absl::StatusOr<Policy> same = ParsePolicy(other);
    ASSERT_EQ(policy.ok(), same.ok()) << one << "\n"
                                      << policy.status() << "\n"
                                      << other << "\n"
                                      << same.status();
    if (!policy.ok()) continue;
    ASSERT_TRUE(Same(*policy, *same)) << one << "\n" << other;
    ASSERT_EQ(policy->text, same->text);
  }
}

// Compares any two of many policies that are often equal.
TEST(RoundTrip, TextsAreEqualExactlyWherePoliciesAre) {
  TestRandom random;
  PolicyWords words(random, /*few=*/true);
  std::vector<Policy> policies;
  std::vector<std::string> spelt;
  while (policies.size() < 1500) {
    const std::string text = words.Spell(words.Next());
    absl::StatusOr<Policy> policy = ParsePolicy(text);
    if (!policy.ok()) continue;
    policies.push_back(*std::move(policy));
    spelt.push_back(text);
  }
  int alike = 0;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      const bool same = Same(policies[i], policies[j]);
      ASSERT_EQ(same, policies[i].text == policies[j].text) << spelt[i] << "\n" << spelt[j];
      alike += same && spelt[i] != spelt[j] ? 1 : 0;
    }
  }
  EXPECT_GT(alike, 100);  // makes sure that enough are equal
}

}  // namespace
}  // namespace tessera::policies
