#include "client/eval/report_page.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "client/eval/chart.h"
#include "client/eval/result_table.h"
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
    bool quoted = false;
    for (std::size_t i = 0; i < tag.size(); ++i) {
      if (tag[i] == '"') quoted = !quoted;
      if (!quoted && tag[i] == '=' && (i + 1 == tag.size() || tag[i + 1] != '"')) {
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

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// One unit per depth, each with `samples` samples under every policy.
class ReportOf : public testing::Test {
 protected:
  struct Answers {
    std::uint32_t right = 0;
    double bytes = 0;
    std::string refused = {};
    std::string not_packed = {};
  };
  // The first `right` of the samples are right. A refused policy answers none in the last unit.
  void Finish(std::uint32_t samples, const std::vector<Answers>& all) {
    plan_.tasks = {"niah, multikey"};
    plan_.lengths = {512};
    plan_.depths = {0, 1};
    plan_.samples = samples;
    results_.emplace(plan_);
    for (std::size_t unit = 0; unit < 2; ++unit) {
      FinishedUnit finished = {.unit = unit};
      for (const Answers& answers : all) {
        Outcome outcome = {
            .right = answers.right,
            .samples = samples,
            .bytes_kept = answers.bytes,
            .not_packed = answers.not_packed,
            .marks = std::string(answers.right, '1') + std::string(samples - answers.right, '0')};
        if (unit == 1 && !answers.refused.empty()) {
          outcome = {.refused = answers.refused, .marks = std::string(samples, '-')};
        }
        finished.outcomes.push_back(outcome);
      }
      results_->Add(finished);
    }
  }
  std::string Page(const PageFacts& facts = {}) const {
    const std::string page = ReportPage(*results_, facts);
    EXPECT_EQ(WhyIllFormed(page), "");
    return page;
  }

  EvaluationPlan plan_;
  std::optional<Results> results_;
};

TEST_F(ReportOf, StartsWithTheBestOfFewBytes) {
  plan_.policies = {{.text = "dense"}, {.text = "h2o"}, {.text = "think"}, {.text = "snapkv"}};
  Finish(100, {{90, 1}, {40, 0.2}, {60, 0.35}, {89, 0.36}});
  EXPECT_EQ(BestWithin(*results_, Question::kBlind, 0.35), 2u);
  EXPECT_THAT(Page(), HasSubstr("<b>think</b> (35.0 % of the bytes, 60 % right), 30.0 points below "
                                "dense (95 % CI -"));
  EXPECT_EQ(BestWithin(*results_, Question::kBlind, 0.1), std::nullopt);
  Finish(100, {{90, 1}, {40, 0.2}, {89, 0.35}, {89, 0.3}});
  EXPECT_EQ(BestWithin(*results_, Question::kBlind, 0.35), 3u) << "fewer bytes break a tie";
  EXPECT_THAT(Page(), HasSubstr("<b>snapkv</b> (30.0 % of the bytes, 89 % right), not separated "
                                "from dense (-1.0 points, 95 % CI -"));
  // Refused for the samples of one depth: its share is of other samples.
  Finish(100, {{90, 1}, {40, 0.2}, {60, 0.35}, {89, 0.3, "no"}});
  EXPECT_EQ(BestWithin(*results_, Question::kBlind, 0.35), 2u);
  Finish(100, {{90, 1}, {40, 0.5}, {60, 0.5}, {89, 0.5}});
  EXPECT_THAT(Page(), HasSubstr("35 % of the bytes or less: none."));
}

TEST_F(ReportOf, DrawsTheParetoFront) {
  plan_.policies = {{.text = "dense"}, {.text = "h2o"}, {.text = "think"}, {.text = "snapkv"}};
  Finish(100, {{90, 1}, {40, 0.2}, {30, 0.35}, {90, 0.5}});
  EXPECT_THAT(ParetoFront(*results_, Question::kBlind), ElementsAre(1u, 3u));
  EXPECT_THAT(Page(), testing::AllOf(HasSubstr("class=\"front\""),
                                     HasSubstr("right answers: h2o, snapkv.</figcaption>")));
  Finish(100, {{90, 1}, {40, 0.2}, {40, 0.2}, {95, 0.5, "no"}});
  EXPECT_THAT(ParetoFront(*results_, Question::kBlind), ElementsAre(1u, 2u, 0u));
}

TEST_F(ReportOf, HasNoChartByDepthOfFewSamples) {
  plan_.policies = {{.text = "dense"}, {.text = "h2o"}};
  Finish(9, {{9, 1}, {3, 0.2}});
  EXPECT_THAT(Page(), testing::AllOf(Not(HasSubstr("aria-label=\"right answers by depth")),
                                     HasSubstr("fewer than 10 samples (the fewest: 9): right "
                                               "answers by depth.")));
  Finish(10, {{9, 1}, {3, 0.2}});
  EXPECT_THAT(Page(), testing::AllOf(HasSubstr("aria-label=\"right answers by depth"),
                                     Not(HasSubstr("fewer than 10 samples"))));
}

TEST_F(ReportOf, LabelsPoliciesByWhatTellsThemApart) {
  plan_.policies = {{.text = "dense"},
                    {.text = "mosaickv:keep={},group=1", .budget = 0.2},
                    {.text = "mosaickv:keep={},group=2", .budget = 0.2},
                    {.text = "h2o:heavy={tokens/2},recent={tokens/2}", .budget = 0.2},
                    {.text = "h2o:heavy={tokens/2},recent={tokens/2}", .budget = 0.5}};
  Finish(10, std::vector<Answers>(5, {5, 1}));
  const std::string page = Page();
  for (const char* label : {"dense", "mosaickv:group=1", "mosaickv:group=2", "h2o"}) {
    EXPECT_THAT(page, HasSubstr(Concat("</svg>", label, "</li>")));
  }
  EXPECT_THAT(page, HasSubstr("<title>h2o at 50 %: 10 of 20 right"));
}

TEST_F(ReportOf, SaysHowToRepeatIt) {
  plan_.policies = {{.text = "dense"}};
  Finish(10, {{5, 1}});
  EXPECT_THAT(Page({.version = "1.2.3",
                    .date = "2026-01-02 03:04 UTC",
                    .model = "/m (5 bytes)",
                    .command = "tessera eval 'a<b'"}),
              HasSubstr("<p>tessera 1.2.3 &#183; 2026-01-02 03:04 UTC &#183; model /m (5 bytes) "
                        "&#183; <code>tessera eval 'a&lt;b'</code></p>"));
  EXPECT_THAT(Page(), testing::AllOf(Not(HasSubstr("<code>")), HasSubstr("name=\"viewport\""),
                                     HasSubstr("overflow-x:auto"), Not(HasSubstr("<p>* "))));
}

TEST_F(ReportOf, ExplainsTheMarkOfRowsThatStayedDense) {
  plan_.policies = {{.text = "dense"}, {.text = "h2o"}};
  Finish(10, {{5, 1}, {5, 1, "", "too short"}});
  EXPECT_THAT(Page(), testing::AllOf(HasSubstr("<td>h2o *</td>"), HasSubstr("<p>* The policy"),
                                     HasSubstr("too short")));
}

TEST_F(ReportOf, AsCsvHasARowPerPolicyAndTask) {
  plan_.policies = {{.text = "dense"}, {.text = "h2o:n={}", .budget = 0.5}, {.text = "think"}};
  Finish(10, {{5, 1}, {4, 0.25, "no \"x\""}, {5, 1, "", "short"}});
  const std::string csv = CsvOf(*results_, 4096);
  EXPECT_EQ(std::ranges::count(csv, '\n'), 4);
  EXPECT_THAT(csv, HasSubstr("\nblind,dense,,\"niah, multikey\",20,10,0.5000,0.2993,0.7007,1.0000,"
                             "4096.0,,,,,,\n"));
  EXPECT_THAT(csv, HasSubstr("\nblind,h2o:n=0.5,0.5,\"niah, multikey\",10,4,0.4000,"));
  EXPECT_THAT(csv, HasSubstr(",0.2500,1024.0,,-0.1000,"));
  EXPECT_THAT(csv, HasSubstr(",,\"no \"\"x\"\"\"\n"));
  EXPECT_THAT(csv, HasSubstr(",short,\n"));
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

TEST(Chart, GivesEveryLineAMarkerAndEveryPointItsInterval) {
  std::vector<std::string> markers;
  for (std::size_t i = 0; i < kMarkers; ++i) markers.push_back(MarkerSvg(i, 7, 7, "t"));
  std::ranges::sort(markers);
  EXPECT_EQ(std::ranges::unique(markers).size(), 0u);
  const Chart chart = {.title = "t",
                       .x_title = "x",
                       .ticks = {{0, "0"}, {1, "1"}},
                       .lines = {{"one", "#123456", {{0, 0.5, "", Interval{0.25, 0.75}}, {1, 1}}}}};
  const std::string svg = chart.Svg();
  // 0.25 and 0.75 are where the grid has them.
  EXPECT_THAT(svg, HasSubstr("class=\"bar\" d=\"M44.0 187.0V81.0"));
  EXPECT_EQ(svg.find("class=\"bar\""), svg.rfind("class=\"bar\""));
}

}  // namespace
}  // namespace tessera::cli::eval
