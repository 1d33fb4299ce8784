// Which terms may be combined, and the reasons for refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/grammar/validate.h"
#include "daemon/policies/registry.h"
#include "daemon/policies/token_system.h"

namespace tessera::policies {
namespace {

using kernels::SelectionRule;
using kernels::Summary;
using testing::ElementsAre;
using testing::HasSubstr;

std::string CombinationError(std::string_view text) {
  const absl::StatusOr<Policy> policy = ParsePolicy(text);
  if (policy.ok()) return Concat("no error, but ", policy->text);
  EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument) << policy.status();
  return std::string(AsStringView(policy.status().message()));
}

// All pairs of terms without options, compared with the rules: dense only alone; one term per
// aspect; value types only for packed rows; with think no selection and no token policy that
// continues while decoding; no such policy with a merging one; planes with no other selection than
// signs, and no value types; signs not beside rows that drop channels.
TEST(Combination, AllPairs) {
  for (const TermKind* one : TermKinds()) {
    for (const TermKind* other : TermKinds()) {
      const auto is = [&](Decides decides) {
        return one->decides == decides || other->decides == decides;
      };
      const bool thinks = one->name == "think" || other->name == "think";
      const auto continues = [](const TermKind& kind) {
        return kind.tokens != nullptr && kind.tokens->advance != nullptr;
      };
      const bool any_continues = continues(*one) || continues(*other);
      const auto named = [&](std::string_view name) {
        return one->name == name || other->name == name;
      };
      const bool refused_by_planes =
          named("planes") && (is(Decides::kValues) || (is(Decides::kSelection) && !named("signs")));
      const bool refused_by_signs = named("signs") && (named("mosaickv") || thinks);
      const bool legal = !refused_by_planes && !refused_by_signs &&
                         !(thinks && (is(Decides::kSelection) || any_continues)) &&
                         !(is(Decides::kMerging) && any_continues) &&
                         one->decides != other->decides && !is(Decides::kNothing) &&
                         (!is(Decides::kValues) || is(Decides::kPacking));
      const std::string text = Concat(one->name, "+", other->name);
      EXPECT_EQ(ParsePolicy(text).ok(), legal) << text << ": " << ParsePolicy(text).status();
    }
  }
}

TEST(Combination, WhatCannotBeMergedIsSaid) {
  EXPECT_EQ(
      CombinationError("lacache+semanticache"),
      "policy, character 9: semanticache: lacache drops tokens while decoding and counts entries, "
      "but a merged entry stands for several tokens");
  EXPECT_THAT(CombinationError("semanticache+chunkkv:reuse=2"),
              HasSubstr("layers that share a decision of chunkkv have different keys"));
  EXPECT_THAT(CombinationError("snapkv+semanticache:scope=layer"),
              HasSubstr("with snapkv each keeps its own"));
  EXPECT_THAT(CombinationError("chunkkv:scope=head+semanticache:scope=layer"),
              HasSubstr("with chunkkv each keeps its own"));
  EXPECT_TRUE(ParsePolicy("chunkkv+semanticache:scope=layer").ok());
  EXPECT_THAT(CombinationError("snapkv+semanticache:key_space=pre"),
              HasSubstr("snapkv scores keys as stored"));
}

TEST(Combination, PresetsAndTheOptionsThatTheySet) {
  EXPECT_EQ(ParsePolicy("planes:small,recent=32")->text, "planes:key=4|2,value=4|2,recent=32");
  EXPECT_EQ(ParsePolicy("planes:near")->text, "planes");
  EXPECT_EQ(ParsePolicy("planes:key=6|2,pressed=4")->text, "planes:key=6|2,pressed=4");
  EXPECT_EQ(
      CombinationError("planes:small,pressed=4"),
      "policy, character 1: planes: pressed shortens 6-bit codes of keys, but key=4|2 has none");
  EXPECT_EQ(CombinationError("planes:key=8|8,small"),
            "policy, character 16: planes: small sets key, which is given already");
  EXPECT_EQ(CombinationError("planes:small,key=8|8"),
            "policy, character 14: planes: key is given twice");
  EXPECT_EQ(CombinationError("planes:small,near"),
            "policy, character 14: planes: near sets key, which is given already");
}

TEST(Combination, SignsAreAnIndexOfPlanesOrOfDenseRows) {
  EXPECT_EQ(ParsePolicy("signs:floor=64+planes")->text, "planes+signs:floor=64");
  EXPECT_EQ(ParsePolicy("signs:choice=call,rate=.25")->text, "signs:rate=0.25,choice=call");
  EXPECT_TRUE(ParsePolicy("signs")->selection->rule.each_query);
  EXPECT_FALSE(ParsePolicy("signs:choice=call")->selection->rule.each_query);
  EXPECT_EQ(ParsePolicy("signs")->selection->rule.floor, 2048u);
  EXPECT_THAT(CombinationError("signs+mosaickv"), HasSubstr("have no index of signs"));
  EXPECT_THAT(CombinationError("think+signs"), HasSubstr("rows with dropped key channels"));
  EXPECT_THAT(CombinationError("signs+quest"), HasSubstr("both decide what attention reads"));
  EXPECT_THAT(CombinationError("signs+int8"), HasSubstr("no term packs rows"));
  EXPECT_THAT(CombinationError("planes+quest"), HasSubstr("their index is signs"));
}

TEST(Combination, TwoSelections) {
  EXPECT_EQ(CombinationError("quest+select"),
            "policy, character 7: quest and select both decide what attention reads");
  EXPECT_EQ(CombinationError("select:rate=.2,entries=3"),
            "policy, character 1: select: rate and entries are both given; give only one of them");
  EXPECT_EQ(CombinationError("select:floor=64,entries=3"),
            "policy, character 1: select: floor and entries are both given; floor is the least "
            "budget by rate");
  for (const char* option : {"select=.2", "select=0", "floor=64", "judge=logit", "first_block=1"}) {
    EXPECT_THAT(CombinationError(Concat("select+mosaickv:", option)),
                HasSubstr("is given, but the term select decides what attention reads"));
    EXPECT_THAT(CombinationError(Concat("mosaickv:", option, "+quest")),
                HasSubstr("is given, but the term quest decides what attention reads"));
  }
}

TEST(Combination, TwoSummaries) {
  for (const char* option : {"block=16", "block=4|8,block_variance=.5"}) {
    EXPECT_THAT(CombinationError(Concat("mosaickv:", option, "+quest")),
                HasSubstr("is given, but the term quest decides how blocks are summarized"));
    EXPECT_TRUE(ParsePolicy(Concat("mosaickv:", option, "+select:entries=64")).ok());
  }
}

TEST(Combination, NothingIsSummedUpWhereNothingIsSelected) {
  const absl::StatusOr<Policy> all = ParsePolicy("mosaickv:select=0");
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->mosaic->strategy.summary, Summary::kNone);
  EXPECT_TRUE(all->mosaic->strategy.blocks.empty());
  EXPECT_FALSE(all->selection.has_value());
  for (const char* option :
       {"floor=0", "judge=share", "first_block=1", "block=4", "block=4|8,block_variance=1"}) {
    EXPECT_THAT(CombinationError(Concat("mosaickv:select=0,", option)),
                HasSubstr("is given, but with select=0 attention reads everything"));
  }
}

TEST(Combination, WhatChangesNothingBesideWhatElseIsGivenIsRefused) {
  for (const auto& [text, why] :
       {std::pair{"mosaickv:reorder=0,reorder_sample=64", "with reorder=0 no channels"},
        {"mosaickv:block=4,block_variance=0.2", "block=4 leaves nothing to choose"},
        {"mosaickv:block_variance=0.2", "block=8 leaves nothing to choose"}}) {
    EXPECT_THAT(ParsePolicy(text).status().ToString(), HasSubstr(why));
  }
  for (const char* text : {"mosaickv:reorder=1,reorder_sample=64", "mosaickv:reorder=0",
                           "mosaickv:block=8|16,block_variance=0.2", "mosaickv:block=8"}) {
    EXPECT_TRUE(ParsePolicy(text).ok()) << text;
  }
}

TEST(Combination, ValuesWithoutPacking) {
  EXPECT_THAT(CombinationError("int8"),
              HasSubstr("int8 is a type of packed values, but no term packs"));
  EXPECT_THAT(CombinationError("quest+fp8"),
              HasSubstr("fp8 is a type of packed values, but no term packs"));
  EXPECT_THAT(CombinationError("dense+int8"),
              HasSubstr("dense cannot be combined with other terms"));
  EXPECT_THAT(CombinationError("mosaickv+int8+fp8"),
              HasSubstr("int8 and fp8 both decide the type of packed values"));
}

// Quest's rule over packed rows whose blocks are Quest's pages.
TEST(Combination, QuestOnPackedRows) {
  const absl::StatusOr<Policy> policy =
      ParsePolicy("quest:page=8,tokens=100,dense_layers=1+mosaickv:keep=.5+int8");
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->text, "mosaickv:keep=0.5+quest:page=8,tokens=96,dense_layers=1");
  ASSERT_TRUE(policy->mosaic.has_value());
  EXPECT_FALSE(policy->summaries.has_value());
  EXPECT_EQ(policy->mosaic->strategy.summary, Summary::kMinMax);
  EXPECT_THAT(policy->mosaic->strategy.blocks, ElementsAre(8u));
  EXPECT_EQ(policy->selection->rule.entries, 96u);
  EXPECT_EQ(policy->selection->rule.judge, SelectionRule::Judge::kLogit);
  EXPECT_FALSE(policy->selection->rule.first_block);
  EXPECT_EQ(policy->selection->dense_layers, 1u);
}

TEST(Combination, SelectionByEntriesOverMeans) {
  const absl::StatusOr<Policy> policy = ParsePolicy("mosaickv:block=4+select:entries=2048");
  ASSERT_TRUE(policy.ok()) << policy.status();
  EXPECT_EQ(policy->mosaic->strategy.summary, Summary::kMean);
  EXPECT_EQ(policy->selection->rule.entries, 2048u);
  EXPECT_EQ(policy->text, "mosaickv:block=4+select:entries=2048");
  EXPECT_EQ(ParsePolicy("mosaickv+select:rate=.25")->text, "mosaickv:select=0.25");
  // An option that mosaickv lacks remains in a separate term.
  EXPECT_EQ(ParsePolicy("mosaickv+select:heads=each")->text, "mosaickv+select:heads=each");
}

TEST(Combination, SegmentsAndShares) {
  EXPECT_EQ(CombinationError("mosaickv:segment=1024"),
            "policy: mosaickv: min_segment 4096 is more than segment 1024");
  EXPECT_TRUE(ParsePolicy("mosaickv:segment=4096").ok());
  EXPECT_EQ(CombinationError("mosaickv:keep=.8,truncate=.25"),
            "policy: mosaickv: keep 0.8 is more than truncate 0.25 leaves, 0.75");
  EXPECT_TRUE(ParsePolicy("mosaickv:keep=.75,truncate=.25").ok());
  EXPECT_TRUE(ParsePolicy("mosaickv:keep=.7,truncate=.3").ok());
  EXPECT_EQ(CombinationError("mosaickv:keep=.0078125"),
            "policy: mosaickv: keep 0.0078125 of head_dim 256 is 2 channels, less than a group of "
            "4");
  EXPECT_TRUE(ParsePolicy("mosaickv:keep=.0078125,group=1|2").ok());
}

// Policies that no text can express, but that a caller can build directly.
TEST(Combination, ValidateRefusesPoliciesThatContradictThemselves) {
  const auto refused = [](const auto& change) {
    Policy policy = *ParsePolicy("mosaickv");
    change(policy);
    return !Validate(policy).ok();
  };
  EXPECT_FALSE(refused([](Policy&) {}));
  EXPECT_TRUE(refused([](Policy& p) { p.summaries.emplace(); }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.kept.clear(); }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.kept = {0}; }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.kept = {1.01}; }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.groups.clear(); }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.groups = {3}; }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.blocks = {5}; }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.blocks.clear(); }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.summary = Summary::kNone; }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->strategy.truncated = 1; }));
  EXPECT_TRUE(refused([](Policy& p) {
    p.mosaic->strategy.truncated = 0.99;  // 2 channels of 256
    p.mosaic->strategy.kept = {0.005};
    p.mosaic->strategy.groups = {1};
  }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->segments.tokens = 65537; }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->segments.tokens = 0; }));
  EXPECT_TRUE(refused([](Policy& p) { p.mosaic->segments.loss_window = 0; }));
  EXPECT_TRUE(refused([](Policy& p) { p.selection->rule.rate = 0; }));
  EXPECT_TRUE(refused([](Policy& p) { p.selection->rule.rate = 1.5; }));
  EXPECT_TRUE(refused([](Policy& p) {
    p.mosaic->strategy.summary = Summary::kNone;
    p.mosaic->strategy.blocks.clear();
  }));
  const auto quest_refused = [](const SummaryPolicy& summaries) {
    Policy policy = *ParsePolicy("quest");
    policy.summaries = summaries;
    return !Validate(policy).ok();
  };
  EXPECT_FALSE(quest_refused({.summary = Summary::kMinMax, .block = 4}));
  EXPECT_TRUE(quest_refused({.summary = Summary::kMinMax, .block = 0}));
  EXPECT_TRUE(quest_refused({.summary = Summary::kNone, .block = 4}));
}

}  // namespace
}  // namespace tessera::policies
