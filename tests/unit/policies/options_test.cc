// Every option: the ends of its range are accepted, values just outside are refused with the option
// and its limit, and the default applies if it is not given.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/registry.h"
#include "tests/unit/policies/same.h"

namespace tessera::policies {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// Other options that are needed so that the ends of this one are compatible.
std::string Beside(const TermKind& kind, const Option& option) {
  static const std::map<std::string, std::string> kBeside = {
      {"mosaickv keep", ",group=1"},
      {"mosaickv truncate", ",keep=0.015625"},
      {"mosaickv segment", ",min_segment=32"},
      {"mosaickv pressed", ",keep=1"},
      {"mosaickv block_variance", ",block=4|8"},
      {"chunkkv tokens", ",window=1"},
      {"snapkv tokens", ",window=1"},
      {"pyramidkv tokens", ",window=1"},
      {"lacache budget", ",sink=0"},
      {"lacache overlap", ",span=1024"},
      {"lacache sink", ",budget=128K"},
      {"streaming budget", ",sink=0"},
  };
  const auto found = kBeside.find(Concat(kind.name, " ", option.name));
  return found == kBeside.end() ? "" : found->second;
}

bool IsText(const Option& option) {
  return option.type == OptionType::kWord || option.type == OptionType::kName;
}

struct Ends {
  std::vector<double> inside;
  std::vector<double> outside;
};

Ends EndsOf(const Option& option) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (IsText(option)) return {};
  if (option.type == OptionType::kSwitch) return {{0, 1}, {2}};
  Ends ends;
  if (!option.possible.empty()) {
    for (const double number : option.possible) ends.inside.push_back(number);
    ends.outside = {option.possible.front() - 1, option.possible.back() + 1,
                    2 * option.possible.back(), option.possible.back() - 1};
    return ends;
  }
  const bool count = option.type == OptionType::kCount;
  const auto below = [&](double number) {
    return count ? number - 1 : std::nextafter(number, -kInfinity);
  };
  const auto above = [&](double number) {
    return count ? number + 1 : std::nextafter(number, kInfinity);
  };
  ends.inside = {option.above_least ? above(option.least) : option.least, option.most};
  ends.outside = {above(option.most)};
  if (option.above_least) {
    ends.outside.push_back(option.least);
  } else if (option.least > 0) {
    ends.outside.push_back(below(option.least));
  }
  if (option.multiple_of != 1) {
    ends.outside.push_back(option.most + option.multiple_of);
    ends.outside.push_back(option.most - 1);
    ends.outside.push_back(option.least + 1);
  }
  return ends;
}

std::string Write(const TermKind& kind, const Option& option, std::string_view value) {
  return Concat(kind.name, ":", option.name, "=", value, Beside(kind, option));
}

void ExpectRefused(const TermKind& kind, const Option& option, std::string_view value) {
  const std::string text = Write(kind, option, value);
  const absl::StatusOr<Policy> policy = ParsePolicy(text);
  ASSERT_FALSE(policy.ok()) << text << " became " << policy->text;
  EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument);
  const std::size_t at = kind.name.size() + option.name.size() + 3;
  EXPECT_THAT(std::string(AsStringView(policy.status().message())),
              AllOf(HasSubstr(Concat("policy, character ", at, ": ", kind.name, ": ", option.name,
                                     ": \"", value, "\"")),
                    HasSubstr("is not ")));
}

void ExpectAccepted(const TermKind& kind, const Option& option, std::string_view value) {
  const std::string text = Write(kind, option, value);
  const absl::StatusOr<Policy> policy = ParsePolicy(text);
  ASSERT_TRUE(policy.ok()) << text << ": " << policy.status();
}

template <typename Check>
void ForEachOption(const Check& check) {
  for (const TermKind* kind : TermKinds()) {
    for (const Option& option : kind->options) check(*kind, option);
  }
}

TEST(Options, EndsOfRanges) {
  int checked = 0;
  ForEachOption([&](const TermKind& kind, const Option& option) {
    if (IsText(option)) return;
    const Ends ends = EndsOf(option);
    for (const double number : ends.inside) ExpectAccepted(kind, option, Concat(number));
    for (const double number : ends.outside) {
      // Whole numbers are written out: counts have no exponents.
      const bool count = option.type != OptionType::kNumber;
      ExpectRefused(kind, option,
                    count ? Concat(static_cast<std::uint64_t>(number)) : Concat(number));
      ++checked;
    }
  });
  EXPECT_GT(checked, 20);
}

TEST(Options, WordsAreTheOnesOfTheTable) {
  ForEachOption([&](const TermKind& kind, const Option& option) {
    if (option.type != OptionType::kWord) return;
    for (const std::string_view word : option.words) {
      ExpectAccepted(kind, option, word);
      ExpectRefused(kind, option, Concat(word, "x"));
    }
    ExpectRefused(kind, option, "");
    ExpectRefused(kind, option, "0");
  });
}

TEST(Options, NamesAreShortAndPlain) {
  const std::string longest(kMaxName, 'a');
  ForEachOption([&](const TermKind& kind, const Option& option) {
    if (option.type != OptionType::kName) return;
    for (const std::string_view word : option.words) ExpectAccepted(kind, option, word);
    for (const std::string& name : {std::string("a"), std::string("Qwen-2.5_x"), longest}) {
      ExpectAccepted(kind, option, name);
    }
    for (const std::string& name : {std::string(), std::string("a/b"), std::string("a b"),
                                    std::string("a|b"), std::string("\"a\""), longest + "a"}) {
      ExpectRefused(kind, option, name);
    }
  });
}

TEST(Options, WhatIsNoNumberIsRefused) {
  ForEachOption([&](const TermKind& kind, const Option& option) {
    if (IsText(option)) return;
    for (const char* value : {"", "-1", "-0", "inf", "nan", "0x1", "1e400", "1K1", "%", "K", "1 0",
                              "1e1%", "share", ".", "1%%", "99999999999999999999999"}) {
      ExpectRefused(kind, option, value);
    }
    if (option.type != OptionType::kNumber) {
      ExpectRefused(kind, option, "0.5");
      ExpectRefused(kind, option, "1%");
      ExpectRefused(kind, option, "18446744073709551615K");
      ExpectRefused(kind, option, "18014398509481985K");  // 2^64 + 1024
    }
    if (!option.list) ExpectRefused(kind, option, "1|1");
  });
}

TEST(Options, ListsAreShortAndNameEachOnce) {
  EXPECT_TRUE(ParsePolicy("mosaickv:keep=.1|.2|.3|.4|.5|.6|.7|.8").ok());
  const auto error = [](std::string_view text) {
    return std::string(AsStringView(ParsePolicy(text).status().message()));
  };
  EXPECT_THAT(error("mosaickv:keep=.1|.2|.3|.4|.5|.6|.7|.8|.9"), HasSubstr("more than 8"));
  EXPECT_THAT(error("mosaickv:keep=.5|50%"), HasSubstr("\"50%\" is given twice"));
  EXPECT_THAT(error("mosaickv:keep=.5|"), HasSubstr("\"\" is not a number"));
}

// For every option in texts, and for the structs that callers build.
TEST(Options, DefaultsAreWhatIsMeantWhereNothingIsSaid) {
  ForEachOption([&](const TermKind& kind, const Option& option) {
    if (option.standard.empty()) return;
    const std::string beside = Beside(kind, option);
    const absl::StatusOr<Policy> said =
        ParsePolicy(Concat(kind.name, ":", option.name, "=", option.standard, beside));
    const absl::StatusOr<Policy> unsaid =
        ParsePolicy(beside.empty() ? std::string(kind.name)
                                   : Concat(kind.name, ":", std::string_view(beside).substr(1)));
    ASSERT_TRUE(said.ok() && unsaid.ok()) << option.name << said.status() << unsaid.status();
    EXPECT_TRUE(Same(*said, *unsaid)) << option.name;
    EXPECT_EQ(said->text, unsaid->text) << option.name;
  });
  Policy mosaic = {
      .mosaic = MosaicPolicy{},
      .selection = SelectionPolicy{.rule = {.rate = 0.1, .floor = 1024, .first_block = true}}};
  EXPECT_TRUE(Same(*ParsePolicy("mosaickv"), mosaic));
  Policy quest = {
      .summaries = SummaryPolicy{},
      .selection = SelectionPolicy{.rule = {.entries = 1024,
                                            .judge = kernels::SelectionRule::Judge::kLogit,
                                            .counts_tail = true},
                                   .dense_layers = 2}};
  EXPECT_TRUE(Same(*ParsePolicy("quest"), quest));
  EXPECT_TRUE(Same(*ParsePolicy(""), Policy{}));
  const std::pair<const char*, TokenPolicy> token_policies[] = {{"chunkkv", ChunkKvPolicy{}},
                                                                {"semantickv", SemanticKvPolicy{}},
                                                                {"lacache", LaCachePolicy{}},
                                                                {"streaming", StreamingPolicy{}},
                                                                {"h2o", H2oPolicy{}},
                                                                {"snapkv", SnapKvPolicy{}},
                                                                {"pyramidkv", PyramidKvPolicy{}},
                                                                {"tova", TovaPolicy{}}};
  for (const auto& [name, tokens] : token_policies) {
    EXPECT_TRUE(Same(*ParsePolicy(name), Policy{.tokens = tokens})) << name;
    EXPECT_FALSE(ParsePolicy(name)->dense());
  }
  EXPECT_TRUE(Same(*ParsePolicy("semanticache"), Policy{.merging = SemantiCachePolicy{}}));
  EXPECT_FALSE(ParsePolicy("semanticache")->dense());
}

// Each option changes the policy, and then appears in its text.
TEST(Options, EveryOptionCounts) {
  ForEachOption([&](const TermKind& kind, const Option& option) {
    std::vector<std::string> values;
    for (const std::string_view word : option.words) values.emplace_back(word);
    for (const double number : EndsOf(option).inside) values.push_back(Concat(number));
    int different = 0;
    for (const std::string& value : values) {
      const absl::StatusOr<Policy> changed = ParsePolicy(Write(kind, option, value));
      const std::string beside = Beside(kind, option);
      const absl::StatusOr<Policy> plain = ParsePolicy(
          beside.empty() ? std::string(kind.name) : Concat(kind.name, ":", beside.substr(1)));
      ASSERT_TRUE(changed.ok() && plain.ok()) << option.name << changed.status() << plain.status();
      if (Same(*changed, *plain)) continue;
      ++different;
      EXPECT_THAT(changed->text, HasSubstr(Concat(option.name, "=")));
    }
    EXPECT_GT(different, 0) << kind.name << " " << option.name;
  });
}

// The metrics count what a policy frees under its first system.
TEST(Options, EverySystemThatFreesMemoryIsCounted) {
  std::set<std::string_view> systems;
  for (const TermKind* kind : Systems()) systems.insert(kind->name);
  EXPECT_EQ(systems.size(), kSystems);
  for (const TermKind* kind : TermKinds()) {
    const absl::StatusOr<Policy> policy = ParsePolicy(kind->name);
    if (!policy.ok()) continue;  // a term that needs another one, or an option
    const std::optional<std::size_t> system = SystemOf(*policy);
    EXPECT_EQ(system.has_value(), !policy->dense()) << kind->name;
    if (system.has_value()) {
      EXPECT_EQ(Systems()[*system]->name, kind->name);
    }
  }
  const absl::StatusOr<Policy> both = ParsePolicy("h2o+mosaickv");
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_EQ(Systems()[SystemOf(*both).value()]->name, "h2o");
}

TEST(Options, RowsAreComplete) {
  for (const TermKind* kind : TermKinds()) {
    EXPECT_FALSE(kind->is.empty());
    EXPECT_THAT(std::string(kind->is), Not(testing::EndsWith(".")));
    EXPECT_FALSE(kind->sets.empty());
    for (const Option& option : kind->options) {
      EXPECT_FALSE(option.help.empty()) << option.name;
      EXPECT_THAT(std::string(option.help), Not(testing::EndsWith("."))) << option.name;
      EXPECT_EQ(option.words.empty(), !IsText(option)) << option.name;
      EXPECT_LT(option.most, 0x1p53) << option.name;
    }
  }
}

}  // namespace
}  // namespace tessera::policies
