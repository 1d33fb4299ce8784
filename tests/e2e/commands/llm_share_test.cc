// One worker computes a text and publishes it; others fork it and answer questions about it, in
// separate processes and through either transport, under several policies. Their answers equal
// those of one process that does everything.

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/eval/tasks/recall_tasks.h"
#include "client/model/generate.h"
#include "client/model/shared_prompt.h"
#include "daemon/base/strings.h"
#include "kernels/format/dense_tile.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using cli::eval::RecallSample;
using cli::eval::RecallTasks;
using cli::eval::Tokens;
using testing::HasSubstr;

const std::string kSharedModel = TESSERA_RECALL_FOLDER;

struct NamedPolicy {
  const char* name;
  const char* text;
  bool keeps_all = true;  // and so nearly every answer is right
  // The background packs tiles that the question's rows complete. After eviction, tiles end at
  // other tokens, so timing decides which step first reads a packed tile.
  bool packs_amid = false;
};
constexpr NamedPolicy kPolicies[] = {
    {"Dense", "dense"},
    {"Mosaic",
     "mosaickv:keep=0.25,group=1,select=0,min_segment=128,loss_k=1,loss_v=1,sinks=0,recent=0"},
    {"Chunks", "chunkkv:budget=0.5", false},
    {"Both", "chunkkv:budget=0.5+mosaickv", false, true}};

// The distance between two sets of logits, relative to their spread around the mean.
double Apart(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  if (a.size() != b.size()) return HUGE_VAL;
  const double mean = std::accumulate(b.begin(), b.end(), 0.0) / static_cast<double>(b.size());
  double difference = 0;
  double spread = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    spread += (b[i] - mean) * (b[i] - mean);
  }
  return std::sqrt(difference / spread);
}
constexpr double kMostApart = 1e-4;

class SharedText : public testing::TestWithParam<NamedPolicy> {
 protected:
  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    auto vocab = llm::Vocab::Read(kSharedModel + "/vocab.json");
    ASSERT_TRUE(vocab.ok()) << vocab.status();
    auto tasks = RecallTasks::Create(*vocab);
    ASSERT_TRUE(tasks.ok()) << tasks.status();
    tasks_.emplace(*std::move(tasks));
    vocab_.emplace(*std::move(vocab));
    auto model = llm::Model::Load(kSharedModel);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
  }

  struct Door {
    std::unique_ptr<client::Worker> worker;
    client::Model model;
  };
  Door Open(bool mapped) {
    auto worker = client::Worker::Attach({.address = daemon_->address(), .map_memory = mapped});
    EXPECT_TRUE(worker.ok()) << worker.status();
    EXPECT_EQ((*worker)->mapped(), mapped);
    auto registered = (*worker)->RegisterModel(
        llm::GeometryOf(model_->config(), "generate", vocab_->delimiters()));
    EXPECT_TRUE(registered.ok()) << registered.status();
    return {*std::move(worker), *std::move(registered)};
  }

  struct Text {
    RecallSample sample;
    std::uint64_t head = 0;       // tokens before the question
    std::string answer;           // computed by one process without sharing
    std::vector<float> logits{};  // of the answer's first word
  };
  // Draws samples whose question and answer fill no tile: the background would pack it, and timing
  // would decide which step first reads it packed.
  RecallSample DrawSample() {
    while (true) {
      auto sample = tasks_->Sample({.task = "niah_multikey",
                                    .length = static_cast<std::uint32_t>(random_.Between(400, 512)),
                                    .depth = static_cast<double>(random_.Below(1001)) / 1000,
                                    .seed = static_cast<std::uint32_t>(random_.Bits())});
      EXPECT_TRUE(sample.ok()) << sample.status();
      const std::size_t head = sample->prompt.size() - sample->question_tokens;
      const std::size_t last = sample->prompt.size() + sample->answer.size() - 1;
      if (head / kernels::kTileEntries == last / kernels::kTileEntries) return *std::move(sample);
    }
  }
  Text Draw() {
    Text text = {.sample = DrawSample()};
    text.head = text.sample.prompt.size() - text.sample.question_tokens;
    Door door = Open(/*mapped=*/true);
    auto sequence = door.worker->CreateSequence(door.model, GetParam().text);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    const std::span<const llm::TokenId> prompt = text.sample.prompt;
    auto logits = llm::Prefill(*model_, prompt.first(text.head), *sequence);
    EXPECT_TRUE(logits.ok()) << logits.status();
    EXPECT_TRUE(sequence->Compress().ok());
    const llm::Turn question[] = {{.sequence = &*sequence, .tokens = prompt.subspan(text.head)}};
    logits = llm::Advance(*model_, *door.worker, question);
    EXPECT_TRUE(logits.ok()) << logits.status();
    text.logits = *logits;
    text.answer = Generate(door, text, *sequence, *std::move(logits));
    return text;
  }
  std::string Generate(Door& door, const Text& text, client::Sequence& sequence,
                       std::vector<float> logits) {
    client::Sequence* const batch[] = {&sequence};
    auto answers =
        llm::Generate(*model_, *door.worker, batch, std::move(logits),
                      {.max_tokens = static_cast<std::uint32_t>(text.sample.answer.size())});
    EXPECT_TRUE(answers.ok()) << answers.status();
    return vocab_->Decode((*answers)[0]);
  }

  struct Said {
    std::string answer;
    bool found = false;
    std::vector<float> logits{};  // of the first word
  };
  // Asks in this process, through gRPC only.
  Said AskThroughGrpc(const Text& text) {
    Door door = Open(/*mapped=*/false);
    auto started = llm::PrefillShared(
        *model_, *door.worker, door.model,
        {.tokens = text.sample.prompt, .head = text.head, .policy = GetParam().text});
    EXPECT_TRUE(started.ok()) << started.status();
    if (!started.ok()) return {};
    Said said = {.found = started->found, .logits = started->logits};
    said.answer = Generate(door, text, started->sequence, std::move(started->logits));
    return said;
  }
  // Asks in a separate process, through mapped memory.
  Said AskAProcess(const Text& text) {
    const std::span<const llm::TokenId> words = std::span(text.sample.prompt).subspan(1);
    const std::string line =
        Concat(TESSERA_BINARY " generate --address=", daemon_->address(), " --model=", kSharedModel,
               " --policy='", GetParam().text, "' --share=", text.head,
               " --tokens=", text.sample.answer.size(), " '", vocab_->Decode(words), "' 2>&1");
    FILE* const pipe = ::popen(line.c_str(), "r");
    EXPECT_NE(pipe, nullptr);
    if (pipe == nullptr) return {};
    std::string printed;
    char piece[4096];
    for (std::size_t got; (got = ::fread(piece, 1, sizeof piece, pipe)) > 0;) {
      printed.append(piece, got);
    }
    const int status = ::pclose(pipe);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << printed;
    const std::string told =
        Concat("first ", text.head, " of ", text.sample.prompt.size(), " tokens: ");
    EXPECT_THAT(printed, HasSubstr(told));
    const std::size_t end = printed.find('\n');
    if (end == std::string::npos) return {};
    const bool found = printed.substr(0, end) == told + "found";
    if (!found) {
      EXPECT_EQ(printed.substr(0, end), told + "computed and published");
    }
    return {.answer = printed.substr(end + 1, printed.size() - end - 2), .found = found};
  }

  TestRandom random_;
  std::unique_ptr<fakes::DaemonProcess> daemon_ = fakes::DaemonProcess::Start({});
  std::optional<llm::Vocab> vocab_;
  std::optional<RecallTasks> tasks_;
  std::unique_ptr<llm::Model> model_;
};

TEST_P(SharedText, AProcessPublishesAndOthersFork) {
  int right = 0;
  for (int round = 0; round < 3; ++round) {
    const Text text = Draw();
    const Said first = AskAProcess(text);
    EXPECT_FALSE(first.found);
    EXPECT_EQ(first.answer, text.answer);
    const bool knows = text.answer == vocab_->Decode(text.sample.answer);
    const Said forked = AskAProcess(text), called = AskThroughGrpc(text);
    for (const Said& said : {forked, called}) {
      EXPECT_TRUE(said.found) << "the process that made it has ended, what it published has not";
    }
    EXPECT_EQ(forked.answer, text.answer);
    // Appended rows are in tiles instead of a tail, and are summed in another order. If the policy
    // has dropped the queried rows, the last bits may decide the guess.
    if (!GetParam().packs_amid) {
      EXPECT_LT(Apart(called.logits, text.logits), kMostApart);
    }
    if (knows || GetParam().keeps_all) {
      EXPECT_EQ(called.answer, text.answer);
    }
    right += knows ? 1 : 0;
  }
  if (GetParam().keeps_all) {
    EXPECT_GT(right, 0) << "or the same answers say little";
  }
}

TEST_P(SharedText, WhatCameThroughGrpcIsForkedThroughMappedMemory) {
  const Text text = Draw();
  const Said first = AskThroughGrpc(text);
  EXPECT_FALSE(first.found);
  EXPECT_EQ(first.answer, text.answer);
  const Said second = AskAProcess(text);
  EXPECT_TRUE(second.found);
  EXPECT_EQ(second.answer, text.answer);
}

TEST_P(SharedText, AHeadLeavesOneToken) {
  const Text text = Draw();
  Door door = Open(/*mapped=*/true);
  for (const std::uint64_t head : {std::uint64_t{0}, text.sample.prompt.size()}) {
    const auto started =
        llm::PrefillShared(*model_, *door.worker, door.model,
                           {.tokens = text.sample.prompt, .head = head, .policy = GetParam().text});
    EXPECT_TRUE(absl::IsInvalidArgument(started.status())) << started.status();
    EXPECT_THAT(started.status().ToString(), HasSubstr(Concat("a prefix of ", head, " of ")));
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, SharedText, testing::ValuesIn(kPolicies),
                         [](const auto& policy) { return std::string(policy.param.name); });

}  // namespace
}  // namespace tessera
