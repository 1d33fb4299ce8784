// Command-line numbers, and invalid ones.

#include "client/tools/flags.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <optional>
#include <string_view>
#include <vector>

namespace tessera::cli {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(WholeNumberTest, IsDigitsAndNothingElse) {
  EXPECT_EQ(WholeNumber("0"), 0u);
  EXPECT_EQ(WholeNumber("281474976710659"), 281474976710659u);
  EXPECT_EQ(WholeNumber("18446744073709551615"), 18446744073709551615u);
  // None of them is parsed as another number.
  for (const std::string_view text : {"", " 5", "5 ", "+5", "-5", "5x", "0x5", "5.0",
                                      "18446744073709551616", "99999999999999999999"}) {
    EXPECT_EQ(WholeNumber(text), std::nullopt) << text;
  }
}

TEST(FlagsTest, ANumberIsRefusedWithItsLimits) {
  Flags flags({{"limit", "N", "how many", "20"}});
  const std::vector<std::string_view> args = {"--limit=-1"};
  ASSERT_TRUE(flags.Parse(args).ok());
  const auto number = flags.Number("limit", 1, 100);
  EXPECT_THAT(number.status().ToString(),
              HasSubstr("--limit is \"-1\"; it must be a whole number from 1 to 100"));
}

TEST(FlagsTest, ASwitchTakesNoValue) {
  Flags flags({{"quick", "", "soon", ""}, {"limit", "N", "how many", "20"}});
  const std::vector<std::string_view> none = {"--quick"}, some = {"--quick=no"},
                                      typo = {"--limt=1"};
  EXPECT_TRUE(flags.Parse(none).ok());
  EXPECT_THAT(flags.Parse(some).ToString(), HasSubstr("--quick takes no value"));
  EXPECT_THAT(flags.Parse(typo).ToString(), HasSubstr("did you mean \"limit\"?"));
}

TEST(FlagsTest, AnInternalFlagIsAcceptedButNotListed) {
  Flags flags({{"limit", "N", "how many", "20"}, {"inner", "", "hidden", "", FlagKind::kInternal}});
  const std::vector<std::string_view> inner = {"--inner"}, typo = {"--outer"};
  EXPECT_THAT(flags.Parse(typo).ToString(), AllOf(HasSubstr("--limit"), Not(HasSubstr("inner"))));
  ASSERT_TRUE(flags.Parse(inner).ok());
  EXPECT_TRUE(flags.Has("inner"));
  EXPECT_TRUE(flags.Declares("inner"));
  EXPECT_FALSE(flags.Declares("outer"));
}

TEST(FlagsTest, AVariableReplacesTheDefaultAndTheFlagReplacesBoth) {
  const std::vector<Flags::Spec> specs = {
      {"address", "ADDRESS", "where", "unix:/default", FlagKind::kOwn, "TESSERA_FLAGS_TEST"}};
  const std::vector<std::string_view> none, given = {"--address", "unix:/flag"};
  const auto address = [&](const std::vector<std::string_view>& args) {
    Flags flags(specs);
    EXPECT_TRUE(flags.Parse(args).ok());
    return flags.Get("address");
  };
  ::unsetenv("TESSERA_FLAGS_TEST");
  EXPECT_EQ(address(none), "unix:/default");
  ::setenv("TESSERA_FLAGS_TEST", "", 1);
  EXPECT_EQ(address(none), "unix:/default");
  ::setenv("TESSERA_FLAGS_TEST", "unix:/variable", 1);
  EXPECT_EQ(address(none), "unix:/variable");
  EXPECT_EQ(address(given), "unix:/flag");
  ::unsetenv("TESSERA_FLAGS_TEST");
}

TEST(FlagsTest, ArgumentsAfterTwoDashesAreNoFlags) {
  Flags flags({{"limit", "N", "how many", "20"}});
  const std::vector<std::string_view> args = {"--limit", "5", "--", "--limit", "-x"};
  ASSERT_TRUE(flags.Parse(args).ok());
  EXPECT_EQ(flags.Get("limit"), "5");
  EXPECT_THAT(flags.positional(), testing::ElementsAre("--limit", "-x"));
}

}  // namespace
}  // namespace tessera::cli
