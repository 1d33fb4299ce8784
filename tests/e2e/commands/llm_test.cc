// A language model over a real daemon: its answers with Tessera's cache, through either transport,
// dense and compressed.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/eval/evaluation.h"
#include "client/eval/tally.h"
#include "client/eval/tasks/recall_tasks.h"
#include "client/model/generate.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using cli::eval::RecallSample;
using cli::eval::RecallTasks;
using cli::eval::Tokens;

const std::string kFolder = TESSERA_RECALL_FOLDER;

class LanguageModel : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    const auto vocab = llm::Vocab::Read(kFolder + "/vocab.json");
    ASSERT_TRUE(vocab.ok()) << vocab.status();
    auto tasks = RecallTasks::Create(*vocab);
    ASSERT_TRUE(tasks.ok()) << tasks.status();
    tasks_.emplace(*std::move(tasks));
    auto model = llm::Model::Load(kFolder);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    const client::ModelGeometry geometry =
        llm::GeometryOf(model_->config(), "recall", vocab->delimiters());
    for (const bool mapped : {true, false}) {
      auto worker = client::Worker::Attach({.address = daemon_->address(), .map_memory = mapped});
      ASSERT_TRUE(worker.ok()) << worker.status();
      ASSERT_EQ((*worker)->mapped(), mapped);
      auto registered = (*worker)->RegisterModel(geometry);
      ASSERT_TRUE(registered.ok()) << registered.status();
      doors_.push_back({*std::move(worker), *std::move(registered)});
    }
  }
  struct Door {
    std::unique_ptr<client::Worker> worker;
    client::Model model;
  };

  RecallSample Draw(const std::string& task, std::uint32_t length) {
    auto sample = tasks_->Sample({.task = task,
                                  .length = length,
                                  .depth = static_cast<double>(random_.Below(1001)) / 1000,
                                  .seed = static_cast<std::uint32_t>(random_.Bits())});
    EXPECT_TRUE(sample.ok()) << sample.status();
    return *std::move(sample);
  }
  client::Sequence NewSequence(Door& door, const std::string& policy) {
    auto sequence = door.worker->CreateSequence(door.model, policy);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }
  std::vector<float> Prefill(const Tokens& prompt, client::Sequence& sequence) {
    auto logits = llm::Prefill(*model_, prompt, sequence);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return *std::move(logits);
  }
  std::vector<Tokens> Generate(Door& door, const std::vector<client::Sequence*>& sequences,
                               std::vector<float> logits, const llm::GenerateOptions& options) {
    auto answers = llm::Generate(*model_, *door.worker, sequences, std::move(logits), options);
    EXPECT_TRUE(answers.ok()) << answers.status();
    return *std::move(answers);
  }
  // The model with its own cache: its answer and the logits of each choice.
  struct Alone {
    Tokens answer;
    std::vector<std::vector<float>> logits;
  };
  Alone AnswerAlone(const Tokens& prompt, std::size_t tokens) {
    llm::LocalAttention own(model_->config());
    Alone alone;
    Tokens next = prompt;
    std::vector<std::uint32_t> positions(prompt.size());
    std::iota(positions.begin(), positions.end(), 0);
    while (true) {
      const std::uint32_t last[] = {static_cast<std::uint32_t>(next.size() - 1)};
      const auto logits =
          model_->Forward({.tokens = next, .positions = positions, .logits_of = last}, own);
      EXPECT_TRUE(logits.ok()) << logits.status();
      alone.answer.push_back(llm::Sampler({}).Choose(*logits));
      alone.logits.push_back(*logits);
      if (alone.answer.size() == tokens) return alone;
      positions = {positions.back() + 1};
      next = {alone.answer.back()};
    }
  }
  // Expects the same tokens, until a choice between two nearly equal logits. The order of additions
  // in attention may decide such a choice, and the texts differ from there on.
  static void ExpectSame(const Tokens& answer, const Alone& alone) {
    constexpr float kAlike = 0.05f;  // for logits of up to 15
    ASSERT_EQ(answer.size(), alone.answer.size());
    for (std::size_t i = 0; i < answer.size(); ++i) {
      if (answer[i] == alone.answer[i]) continue;
      EXPECT_LT(alone.logits[i][alone.answer[i]] - alone.logits[i][answer[i]], kAlike) << i;
      break;
    }
  }

  TestRandom random_;
  std::unique_ptr<fakes::DaemonProcess> daemon_ = fakes::DaemonProcess::Start({});
  std::optional<RecallTasks> tasks_;
  std::unique_ptr<llm::Model> model_;
  std::vector<Door> doors_;
};

TEST_F(LanguageModel, GivesTheSameAnswerOverEitherTransport) {
  constexpr std::uint32_t kTokens = 40;  // beyond the answer, across a tile boundary
  for (const char* const task : {"niah_multikey", "vt2", "qa_place"}) {
    SCOPED_TRACE(task);
    const RecallSample sample = Draw(task, static_cast<std::uint32_t>(random_.Between(128, 600)));
    const Alone alone = AnswerAlone(sample.prompt, kTokens);
    for (Door& door : doors_) {
      client::Sequence sequence = NewSequence(door, "dense");
      const auto answers =
          Generate(door, {&sequence}, Prefill(sample.prompt, sequence), {.max_tokens = kTokens});
      ExpectSame(answers[0], alone);
      EXPECT_EQ(sequence.tokens(), sample.prompt.size() + kTokens - 1);
    }
  }
}

// A batch of sequences of different lengths, some of which end early. Sampled, so that more can go
// wrong.
TEST_F(LanguageModel, SaysInABatchWhatItSaysBySelf) {
  Door& door = doors_[0];
  const llm::SamplerOptions sampler = {.temperature = 1.5, .top_k = 20, .seed = random_.Bits()};
  std::vector<client::Sequence> batch, single;
  std::vector<float> logits;
  std::vector<Tokens> alone;
  for (std::uint64_t i = 0; i < 5; ++i) {
    const RecallSample sample = Draw("niah_single", 128 + 30 * static_cast<std::uint32_t>(i));
    batch.push_back(NewSequence(door, ""));
    const std::vector<float> first = Prefill(sample.prompt, batch.back());
    logits.insert(logits.end(), first.begin(), first.end());
    single.push_back(NewSequence(door, ""));
    llm::GenerateOptions options = {.max_tokens = 30, .stop = 3, .sampler = sampler};
    options.sampler.seed += i;
    alone.push_back(
        Generate(door, {&single.back()}, Prefill(sample.prompt, single.back()), options)[0]);
  }
  std::vector<client::Sequence*> sequences;
  for (client::Sequence& sequence : batch) sequences.push_back(&sequence);
  EXPECT_EQ(Generate(door, sequences, logits, {.max_tokens = 30, .stop = 3, .sampler = sampler}),
            alone);
}

// The question follows after the context has been appended. The result equals that of one prompt,
// although Tessera computes its attention.
TEST_F(LanguageModel, TextThatFollowsIsReadThroughTheCache) {
  const RecallSample sample = Draw("niah_multikey", 512);
  const Alone alone = AnswerAlone(sample.prompt, sample.answer.size());
  for (Door& door : doors_) {
    client::Sequence sequence = NewSequence(door, "dense");
    const std::span<const llm::TokenId> prompt = sample.prompt;
    const std::size_t context = prompt.size() - sample.question_tokens;
    Prefill(Tokens(prompt.begin(), prompt.begin() + context), sequence);
    const llm::Turn turns[] = {{.sequence = &sequence, .tokens = prompt.subspan(context)}};
    auto logits = llm::Advance(*model_, *door.worker, turns);
    ASSERT_TRUE(logits.ok()) << logits.status();
    const auto answers = Generate(door, {&sequence}, *std::move(logits),
                                  {.max_tokens = static_cast<std::uint32_t>(sample.answer.size())});
    ExpectSame(answers[0], alone);
  }
}

// The context is compressed before the question is appended. The first policy leaves lanes dense
// whose rows would lose too much; the second always keeps a quarter of every row's channels.
TEST_F(LanguageModel, AnswersFromAQuarterOfTheChannels) {
  constexpr int kSamples = 8;
  for (const char* const policy : {"mosaickv:keep=0.25,group=1,select=0",
                                   "mosaickv:keep=0.25,group=1,select=0,loss_k=1,loss_v=1"}) {
    int right = 0;
    for (int i = 0; i < kSamples; ++i) {
      const RecallSample sample = Draw("niah_single", 512);
      Door& door = doors_[i % 2];
      client::Sequence sequence = NewSequence(door, policy);
      const std::span<const llm::TokenId> prompt = sample.prompt;
      const std::size_t context = prompt.size() - sample.question_tokens;
      Prefill(Tokens(prompt.begin(), prompt.begin() + context), sequence);
      const auto compressed = sequence.Compress();
      ASSERT_TRUE(compressed.ok()) << compressed.status();
      const llm::Turn turns[] = {{.sequence = &sequence, .tokens = prompt.subspan(context)}};
      auto logits = llm::Advance(*model_, *door.worker, turns);
      ASSERT_TRUE(logits.ok()) << logits.status();
      const auto answers =
          Generate(door, {&sequence}, *std::move(logits),
                   {.max_tokens = static_cast<std::uint32_t>(sample.answer.size())});
      right += answers[0] == sample.answer;
    }
    std::printf("%s: %d of %d right\n", policy, right, kSamples);
    EXPECT_GE(right, 6) << policy;  // measured: 8 of 8
  }
}

TEST_F(LanguageModel, AnEvaluationCountsAnswers) {
  const auto evaluation =
      cli::eval::Evaluation::Open({.model_folder = kFolder, .address = daemon_->address()});
  ASSERT_TRUE(evaluation.ok()) << evaluation.status();
  const std::string crude =
      "mosaickv:keep=0.02,group=1,loss_k=1,loss_v=1,sinks=0,recent=0,select=0+bf16";
  cli::eval::EvaluationPlan plan = {
      .policies = {{.text = "dense"},
                   {.text = crude},
                   {.text = "chunkkv:budget={}", .budget = 0.1}},
      .tasks = {"niah_single", "vt1"},
      .lengths = {512},
      .depths = {0, 1},
      .questions = {cli::eval::Question::kBlind, cli::eval::Question::kSeen},
      .samples = 2,
      .first_seed = static_cast<std::uint32_t>(random_.Bits() >> 33),
      .batch = 2};
  cli::eval::Results results(plan);
  std::size_t answered = 0, finished = 0;
  const cli::eval::Evaluation::Listener listener = {
      .answered = [&](const cli::eval::Unit&) { ++answered; },
      .finished =
          [&](const cli::eval::FinishedUnit& unit) {
            EXPECT_NE(unit.unit, 3u);
            ++finished;
            results.Add(unit);
            return absl::OkStatus();
          }};
  const absl::Status ran = (*evaluation)->Run(plan, {.runners = 2, .except = {3}}, listener);
  ASSERT_TRUE(ran.ok()) << ran;
  EXPECT_EQ(finished, 7u);
  EXPECT_EQ(answered, 7u * 2 * 3);
  const auto all = [](const cli::eval::Unit&) { return true; };
  const cli::eval::Tally dense = results.Of(0, all), cut = results.Of(1, all),
                         chunks = results.Of(2, all);
  EXPECT_EQ(dense.samples, 14u);
  // The model was measured at 500 of 500. A rare miss counts twice here, since both questions miss
  // it.
  EXPECT_GE(dense.right, 12u);
  EXPECT_LE(cut.right, 7u);  // two of 128 channels are not enough
  // Rotations and partial tiles are a large share of such a short text.
  EXPECT_GT(dense.bytes_kept(), 1 - 1e-9);
  EXPECT_LT(dense.bytes_kept(), 1.25);
  EXPECT_LT(cut.bytes_kept(), 0.75);
  EXPECT_LT(chunks.bytes_kept(), 0.3);
  plan.policies.push_back({.text = "mosaickv:keep=2"});
  const absl::Status refused = (*evaluation)->Run(plan, {}, listener);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
}

}  // namespace
}  // namespace tessera
