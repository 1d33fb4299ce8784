// The parts of an evaluation with a language model that need neither model nor daemon.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "client/eval/text/needles.h"
#include "client/eval/text/text_report.h"
#include "client/eval/text/text_results.h"
#include "client/eval/text/texts.h"
#include "tests/fakes/model/tiny_model.h"
#include "tests/fakes/seed.h"
#include "tests/unit/client/model/temporary_file.h"

namespace tessera::cli::eval {
namespace {

using testing::HasSubstr;

std::unique_ptr<llm::Tokenizer> BytesTokenizer() {
  const fakes::TinyModel tiny("llama", true, [] { return 0.0f; });
  const llm::TemporaryFile file(tiny.Gguf().File());
  auto tokenizer = llm::ReadTokenizer(file.path());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(Needles, EachIsInTheTextOnceAndAnswersItsQuestion) {
  TestRandom random;
  const auto tokenizer = BytesTokenizer();
  std::string prose;
  while (prose.size() < 5000) prose += random.OneIn(6) ? ". " : "word ";
  const auto text = tokenizer->Encode(prose);
  ASSERT_TRUE(text.ok()) << text.status();
  for (const std::uint32_t count : {1u, 4u, 8u, 16u}) {
    const std::uint32_t seed = random.Below(1000);
    const auto hidden = HideNeedles(*tokenizer, *text, 2000, count, seed);
    ASSERT_TRUE(hidden.ok()) << hidden.status();
    EXPECT_EQ(hidden->context.size(), 2000u);
    ASSERT_EQ(hidden->questions.size(), count);
    const std::string context = tokenizer->Decode(hidden->context);
    std::size_t before = 0;
    for (const NeedleText::Question& asked : hidden->questions) {
      std::string sentence = tokenizer->Decode(asked.question);
      sentence = sentence.substr(sentence.rfind("The secret")) + tokenizer->Decode(asked.answer);
      const std::size_t at = context.find(sentence + ".\n");
      ASSERT_NE(at, std::string::npos) << sentence;
      EXPECT_EQ(context.find(sentence, at + 1), std::string::npos);
      EXPECT_GE(at, before);  // in the order of the text
      before = at;
    }
    EXPECT_EQ(HideNeedles(*tokenizer, *text, 2000, count, seed)->context, hidden->context);
  }
  EXPECT_TRUE(absl::IsInvalidArgument(HideNeedles(*tokenizer, *text, 9000, 1, 0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(HideNeedles(*tokenizer, *text, 100, 16, 0).status()));
}

// 95 % of intervals contain the mean of the distribution.
TEST(Estimates, IntervalsContainTheMeanAsOftenAsTheySay) {
  std::mt19937_64 random(TestSeed());
  std::normal_distribution<double> normal(0.3, 2);
  for (const std::size_t count : {2u, 5u, 40u}) {
    int inside = 0;
    constexpr int kRounds = 4000;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<double> values(count);
      for (double& value : values) value = normal(random);
      const Estimate estimate = EstimateOf(values);
      inside += std::abs(estimate.mean - 0.3) <= estimate.half ? 1 : 0;
    }
    // Six standard deviations of the share.
    EXPECT_NEAR(inside / double{kRounds}, 0.95, 6 * std::sqrt(0.95 * 0.05 / kRounds)) << count;
  }
  EXPECT_EQ(EstimateOf({}).half, 0);
  EXPECT_EQ(EstimateOf({5}).mean, 5);
}

TextResults TwoTexts() {
  TextResults results({.policies = {{.text = "dense"}, {.text = "tova<&>"}},
                       .lengths = {512},
                       .needles = {1, 4},
                       .questions = {Question::kBlind},
                       .texts = 2});
  for (std::size_t unit = 0; unit < 2; ++unit) {
    FinishedText text;
    text.outcomes.resize(2);
    text.outcomes[0] = {.bytes_kept = 1,
                        .differences = {0.5 * static_cast<double>(unit), 0.25},
                        .divergence = 0.5,
                        .same_choice = unit == 0 ? 1.0 : 0.5,
                        .asked = {{{1, 1}}, {{2, 4}}}};
    text.outcomes[1] = text.outcomes[0];
    if (unit == 1) text.outcomes[1] = {.refused = "too short"};
    results.Add(unit, std::move(text));
  }
  return results;
}

TEST(TextResults, FiguresAreOfTheTextsThatWereMeasured) {
  const TextResults results = TwoTexts();
  const TextFigures both = results.Of(0, 512);
  EXPECT_EQ(both.texts, 2u);
  EXPECT_DOUBLE_EQ(both.difference.mean, 0.25);
  EXPECT_DOUBLE_EQ(both.same_choice, 0.75);
  EXPECT_EQ(both.asked[1][0].right, 4u);
  EXPECT_EQ(both.asked[1][0].samples, 8u);
  const TextFigures one = results.Of(1, 512);
  EXPECT_EQ(one.texts, 1u);
  EXPECT_EQ(one.refused, "too short");
  EXPECT_DOUBLE_EQ(one.same_choice, 1);
  EXPECT_EQ(results.Of(0, 1024).texts, 0u);
}

TEST(TextReport, EveryFormNamesThePolicies) {
  const TextResults results = TwoTexts();
  const TextFacts facts = {
      .dense_bytes_per_token = 100, .command = "tessera eval", .texts = {"/a/b"}};
  const std::string text = TextSummary(results, facts);
  EXPECT_THAT(text, HasSubstr("tova<&> at 512 tokens was refused: too short"));
  EXPECT_THAT(text, HasSubstr("read: /a/b"));
  EXPECT_THAT(text, HasSubstr("4/8"));
  const std::string page = TextPage(results, facts);
  EXPECT_THAT(page, HasSubstr("tova&lt;&amp;&gt;"));
  EXPECT_THAT(page, testing::Not(HasSubstr("tova<&>")));
  EXPECT_THAT(page, testing::Not(HasSubstr("<script")));
  const std::string csv = TextCsv(results, facts);
  EXPECT_THAT(csv, HasSubstr("length,policy,bytes_per_token,texts,bytes_kept,difference"));
  EXPECT_THAT(csv, HasSubstr("512,\"dense\",100.0,2,1,0.25,"));
  EXPECT_EQ(std::ranges::count(csv, '\n'), 3);
  EXPECT_THAT(TextJson(results), HasSubstr("\"needles4_blind_right\": 4"));
}

TEST(Texts, NamedFilesAreReadAndMissingOnesNamed) {
  const llm::TemporaryFile file("some text");
  const auto texts = ReadTexts({file.path()});
  ASSERT_TRUE(texts.ok()) << texts.status();
  EXPECT_EQ((*texts)[0].text, "some text");
  EXPECT_THAT(std::string(ReadTexts({"/nowhere/a"}).status().message()), HasSubstr("/nowhere/a"));
}

}  // namespace
}  // namespace tessera::cli::eval
