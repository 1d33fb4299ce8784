// The recall model with an exact cache solves the tasks that it was trained for.

#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "client/eval/tasks/recall_tasks.h"
#include "client/model/model.h"
#include "client/model/sampler.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::eval {
namespace {

const std::string kModelFolder = TESSERA_RECALL_FOLDER;

std::vector<float> Forward(const llm::Model& model, const Tokens& tokens, std::size_t first,
                           llm::Attention& attention) {
  std::vector<std::uint32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), static_cast<std::uint32_t>(first));
  const std::uint32_t last[] = {static_cast<std::uint32_t>(tokens.size() - 1)};
  auto logits =
      model.Forward({.tokens = tokens, .positions = positions, .logits_of = last}, attention);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return *std::move(logits);
}

TEST(RecallModel, AnswersAlone) {
  auto vocab = llm::Vocab::Read(kModelFolder + "/vocab.json");
  ASSERT_TRUE(vocab.ok()) << vocab.status();
  auto tasks = RecallTasks::Create(*vocab);
  ASSERT_TRUE(tasks.ok()) << tasks.status();
  auto model = llm::Model::Load(kModelFolder);
  ASSERT_TRUE(model.ok()) << model.status();
  TestRandom random;
  constexpr int kSamples = 20;
  int right = 0;
  for (int i = 0; i < kSamples; ++i) {
    const auto sample = tasks->Sample({.task = "niah_single",
                                       .length = 256,
                                       .depth = static_cast<double>(random.Below(1001)) / 1000,
                                       .seed = static_cast<std::uint32_t>(random.Bits())});
    ASSERT_TRUE(sample.ok()) << sample.status();
    llm::LocalAttention own((*model)->config());
    std::vector<float> logits = Forward(**model, sample->prompt, 0, own);
    Tokens answer;
    while (true) {
      answer.push_back(llm::Sampler({}).Choose(logits));
      if (answer.size() == sample->answer.size()) break;
      logits = Forward(**model, {answer.back()}, sample->prompt.size() + answer.size() - 1, own);
    }
    right += answer == sample->answer;
  }
  std::printf("%d of %d right\n", right, kSamples);
  EXPECT_GE(right, kSamples * 95 / 100);  // measured: 250 of 250
}

}  // namespace
}  // namespace tessera::cli::eval
