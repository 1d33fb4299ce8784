#include "daemon/policies/grammar/help.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/registry.h"

namespace tessera::policies {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// From "\nNAME: " to the next empty line.
std::string SectionOf(const std::string& help, std::string_view name) {
  const std::size_t at = help.find(Concat("\n", name, ": "));
  if (at == std::string::npos) return "";
  return help.substr(at, help.find("\n\n", at) - at);
}

TEST(Help, HasEveryTermWithEveryOption) {
  const std::string help = HelpText();
  for (const TermKind* kind : TermKinds()) {
    const std::string section = SectionOf(help, kind->name);
    EXPECT_THAT(section, AllOf(HasSubstr(kind->is), HasSubstr(kind->sets)));
    if (kind->tokens != nullptr) {
      EXPECT_FALSE(kind->paper.empty()) << kind->name;
      EXPECT_THAT(section, HasSubstr(Concat("\n  Paper: ", kind->paper, ".\n")));
      EXPECT_THAT(section, HasSubstr(Concat("\n  Needs: ", NeedsTextOf(*kind), ".\n")));
    }
    for (const Option& option : kind->options) {
      const std::size_t at = section.find(Concat("\n  ", option.name, " "));
      ASSERT_NE(at, std::string::npos) << kind->name << " " << option.name;
      EXPECT_THAT(
          section.substr(at, section.find('\n', at + 1) - at),
          AllOf(HasSubstr(TypeText(option)), HasSubstr(option.standard),
                HasSubstr(RangeText(option)), HasSubstr(option.unit), HasSubstr(option.help)));
    }
  }
}

// The lines between the first two empty ones: a policy, two blanks, its meaning.
TEST(Help, ItsExamplesAreGood) {
  std::istringstream lines(HelpText());
  int examples = 0;
  int empty_lines = 0;
  for (std::string line; empty_lines < 2 && std::getline(lines, line);) {
    if (line.empty()) ++empty_lines;
    if (!line.starts_with("  ")) continue;
    const std::string policy = line.substr(2, line.find("  ", 2) - 2);
    EXPECT_TRUE(ParsePolicy(policy).ok()) << line << ": " << ParsePolicy(policy).status();
    ++examples;
  }
  EXPECT_EQ(examples, 5);
}

}  // namespace
}  // namespace tessera::policies
