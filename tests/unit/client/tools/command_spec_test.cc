// The texts that are made from a command's specification.

#include "client/tools/command_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace tessera::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

const CommandSpec kSpec = {
    .name = "paint",
    .summary = "paint a thing",
    .description = "Paints a thing.\n",
    .arguments = {{.name = "THING", .hint = "'tessera things' lists them"},
                  {.name = "COLOUR", .hint = "", .required = false, .repeats = true}},
    .examples = {"tessera paint door red"},
    .flags = {{"coats", "N", std::string(30, 'w') + " " + std::string(30, 'v'), "2"},
              {"inner", "", "hidden", "", FlagKind::kInternal}}};

TEST(CommandSpecTest, HelpShowsOwnFlagsAndLeadsToTheOthers) {
  const std::string help = HelpText(kSpec);
  EXPECT_THAT(help, HasSubstr("Usage: tessera paint THING [COLOUR...] [flags]\n"));
  EXPECT_THAT(help, HasSubstr("\nExample:\n  tessera paint door red\n"));
  EXPECT_THAT(help, HasSubstr("--coats=N"));
  EXPECT_THAT(help, HasSubstr("Default: 2."));
  EXPECT_THAT(help, HasSubstr("'tessera help connection'"));
  EXPECT_THAT(help, Not(HasSubstr("--tls")));
  EXPECT_THAT(help, Not(HasSubstr("inner")));
  CommandSpec local = kSpec;
  local.connects = Connects::kNowhere;
  EXPECT_THAT(HelpText(local), Not(HasSubstr("connection")));
}

TEST(CommandSpecTest, HelpFitsEightyColumns) {
  for (const std::string& text : {HelpText(kSpec), ConnectionHelpText()}) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST(CommandSpecTest, ArgumentsAreNamedIfTheyAreMissingOrTooMany) {
  EXPECT_EQ(CheckArguments(kSpec, {}).message(), "missing THING; 'tessera things' lists them");
  EXPECT_TRUE(CheckArguments(kSpec, {"door"}).ok());
  EXPECT_TRUE(CheckArguments(kSpec, {"door", "red", "green", "blue"}).ok());
  CommandSpec one = kSpec;
  one.arguments.pop_back();
  EXPECT_EQ(CheckArguments(one, {"door", "red"}).message(),
            "unexpected argument \"red\"; usage: tessera paint THING [flags]");
}

TEST(CommandSpecTest, TheConnectionIsExplainedOnce) {
  const std::string help = ConnectionHelpText();
  for (const char* flag :
       {"--address=", "--token=", "--tls-ca=", "--tls-name=", "TESSERA_ADDRESS", "TESSERA_TOKEN"}) {
    EXPECT_THAT(help, HasSubstr(flag));
  }
}

}  // namespace
}  // namespace tessera::cli
