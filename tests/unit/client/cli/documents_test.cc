// The help of all commands, the manual page and the completion.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <string>

#include "client/bench/bench.h"
#include "client/cli/command.h"
#include "client/cli/help.h"
#include "client/cli/manual.h"
#include "daemon/base/strings.h"

namespace tessera::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

template <typename Act>
void ForEachCommand(const Act& act) {
  for (const std::string& name : CommandNames()) act(FindCommand(name)->spec());
  for (const bench::Benchmark& benchmark : bench::Benchmarks()) act(BenchSpecOf(benchmark));
}

TEST(DocumentsTest, EveryCommandHasASummaryAnExampleAndHelpOfEightyColumns) {
  std::set<std::string> names;
  ForEachCommand([&](const CommandSpec& spec) {
    EXPECT_FALSE(spec.summary.empty()) << spec.name;
    ASSERT_FALSE(spec.examples.empty()) << spec.name;
    EXPECT_FALSE(spec.summary.ends_with('.')) << spec.name;
    std::istringstream lines(HelpText(spec));
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("  ")) continue;
      EXPECT_LE(line.size(), 80u) << spec.name << ": " << line;
    }
    for (const Flags::Spec& flag : spec.flags) {
      if (flag.kind == FlagKind::kInternal) continue;
      EXPECT_TRUE(flag.help.ends_with('.')) << spec.name << " --" << flag.name;
    }
  });
  for (const std::string& name : CommandNames()) EXPECT_TRUE(names.insert(name).second) << name;
}

TEST(DocumentsTest, TheManualHasEveryCommandAndFlag) {
  const std::string page = ManualPage();
  EXPECT_THAT(page, testing::StartsWith(".TH TESSERA 1 "));
  for (const std::string& name : CommandNames()) {
    const CommandSpec spec = FindCommand(name)->spec();
    for (const Flags::Spec& flag : spec.flags) {
      std::string escaped;  // as troff writes it
      for (const char c : flag.name) escaped += c == '-' ? std::string("\\-") : std::string(1, c);
      if (flag.kind == FlagKind::kInternal) continue;
      EXPECT_THAT(page, HasSubstr("\\fB\\-\\-" + escaped)) << name;
    }
  }
  for (const char* word : {"TESSERA_ADDRESS", "NO_COLOR", "EXIT STATUS", "tesserad(8)"}) {
    EXPECT_THAT(page, HasSubstr(word));
  }
  EXPECT_THAT(page, Not(HasSubstr("serve\\-units"))) << "an internal flag";
}

TEST(DocumentsTest, TextOfAManualIsTakenLiterally) {
  Manual manual("x", 1, "a-b");
  manual.Paragraphs(".request\n'quote'\n\nback\\slash\n  kept  as it is\nmore");
  EXPECT_THAT(manual.text(), HasSubstr("x \\- a\\-b\n"));
  EXPECT_THAT(manual.text(), HasSubstr(".PP\n\\&.request\n\\&\\(aqquote\\(aq\n.PP\n"
                                       "back\\eslash\n.RS 4\n.nf\nkept  as it is\n.fi\n.RE\n"
                                       "more\n"));
}

TEST(DocumentsTest, TheOverviewNamesEveryCommand) {
  for (const std::string& name : CommandNames()) {
    EXPECT_THAT(Overview(), HasSubstr(Concat("\n  ", name, " ")));
    EXPECT_THAT(BashCompletion(), HasSubstr(Concat("    ", name, ")\n")));
  }
  EXPECT_THAT(BashCompletion(), Not(HasSubstr("--serve-units"))) << "an internal flag";
}

}  // namespace
}  // namespace tessera::cli
