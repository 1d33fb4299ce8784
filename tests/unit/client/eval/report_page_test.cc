#include "client/eval/report_page.h"

#include <gmock/gmock.h>

#include <cctype>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "client/eval/chart.h"
#include "daemon/base/strings.h"
#include "tests/unit/client/eval/random_plan.h"

namespace tessera::cli::eval {
namespace {

// Returns an empty string if all tags are closed in order, all attributes are quoted and the text
// has no unescaped markup.
std::string WhyIllFormed(std::string_view page) {
  std::vector<std::string> open;
  for (std::size_t at = 0; at < page.size();) {
    if (page[at] == '>') return Concat("a loose > at ", at);
    if (page[at] == '&') {
      const std::size_t end = page.find(';', at);
      if (end == std::string_view::npos || end - at > 8) return Concat("a loose & at ", at);
    }
    if (page[at] != '<') {
      ++at;
      continue;
    }
    const std::size_t end = page.find('>', at);
    if (end == std::string_view::npos) return Concat("an open tag at ", at);
    const std::string tag(page.substr(at + 1, end - at - 1));
    at = end + 1;
    if (tag.find('<') != std::string::npos) return "a tag in a tag: " + tag;
    if (tag.starts_with("!DOCTYPE")) continue;
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0) return "an odd quote: " + tag;
    for (std::size_t i = 0; i < tag.size(); ++i) {
      if (tag[i] == '=' && (i + 1 == tag.size() || tag[i + 1] != '"')) {
        return "an attribute without quotes: " + tag;
      }
    }
    const std::string name = tag.substr(tag[0] == '/' ? 1 : 0, tag.find_first_of(" /", 1) - 0);
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "closed out of order: " + tag;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
  }
  return open.empty() ? "" : "never closed: " + open.back();
}

TEST(ReportPage, IsWellFormedAndHoldsEveryPolicy) {
  TestRandom random;
  for (int i = 0; i < 20; ++i) {
    EvaluationPlan plan = RandomPlan(random);
    plan.policies.push_back({.text = "odd<\"&>:x={}", .budget = 0.2});
    Results results(plan);
    for (std::size_t unit = 0; unit < results.units().size(); ++unit) {
      if (!random.OneIn(5)) results.Add(RandomUnit(random, plan, unit));
    }
    const std::string page =
        ReportPage(results, {.machine = "a <machine> & co", .dense_bytes_per_token = 4096});
    EXPECT_EQ(WhyIllFormed(page), "");
    for (const PolicyAt& policy : plan.policies) {
      const std::string cell = Concat("<td>", Escaped(policy.Name()));
      EXPECT_THAT(page, testing::AnyOf(testing::HasSubstr(cell + "</td>"),
                                       testing::HasSubstr(cell + " *</td>")));
    }
    EXPECT_THAT(page, testing::HasSubstr("chunkkv+mosaickv"));
    // No external resources.
    for (const char* const foreign : {"<script", "http:", "https:", "src=", "@import", "url("}) {
      EXPECT_THAT(page, testing::Not(testing::HasSubstr(foreign)));
    }
    EXPECT_THAT(page, testing::Not(testing::HasSubstr("nan")));
    EXPECT_THAT(page, testing::Not(testing::HasSubstr("inf")));
  }
}

TEST(ReportPage, TheCheckOfFormFindsFaults) {
  EXPECT_NE(WhyIllFormed("<p>a<b>c</p></b>"), "");
  EXPECT_NE(WhyIllFormed("<p>a"), "");
  EXPECT_NE(WhyIllFormed("<p>a & b</p>"), "");
  EXPECT_NE(WhyIllFormed("<p class=x>a</p>"), "");
  EXPECT_EQ(WhyIllFormed("<p class=\"x\">a<br/>&lt;</p>"), "");
}

// Points are inside the picture, and higher for better scores.
TEST(Chart, PutsSharesUpwards) {
  const Chart chart = {.title = "t",
                       .x_title = "x",
                       .ticks = {{0, "0"}, {1, "1"}},
                       .lines = {{"one", "#123456", {{0, 0.25, "low"}, {1, 0.75, "high"}}}}};
  const std::string svg = chart.Svg();
  std::vector<double> y;
  for (std::size_t at = svg.find("cy=\""); at != std::string::npos;
       at = svg.find("cy=\"", at + 1)) {
    y.push_back(std::atof(svg.c_str() + at + 4));
  }
  ASSERT_EQ(y.size(), 2u);
  EXPECT_LT(y[1], y[0]);
  EXPECT_GT(y[1], 0);
  EXPECT_LT(y[0], 280);
}

}  // namespace
}  // namespace tessera::cli::eval
