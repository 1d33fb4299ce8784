// The samples equal those of the Python generator, stored in tests/golden/recall.

#include "client/eval/tasks/recall_tasks.h"

#include <gmock/gmock.h>

#include <cstdio>
#include <string>

#include "client/model/checkpoint/json.h"
#include "tests/fakes/seed.h"

namespace tessera::cli::eval {
namespace {

using testing::HasSubstr;

const std::string kFolder = TESSERA_RECALL_FOLDER;

class RecallSamples : public testing::Test {
 protected:
  void SetUp() override {
    vocab_ = *llm::Vocab::Read(kFolder + "/vocab.json");
    auto tasks = RecallTasks::Create(vocab_);
    ASSERT_TRUE(tasks.ok()) << tasks.status();
    tasks_.emplace(*std::move(tasks));
    auto golden = llm::ReadJsonFile(kFolder + "/samples.json");
    ASSERT_TRUE(golden.ok()) << golden.status();
    golden_ = *std::move(golden);
  }
  const auto& Golden(const std::string& key) {
    return llm::Find(golden_, key)->list_value().values();
  }
  static RecallQuery QueryOf(const llm::Json& item, const std::string& seed) {
    return {.task = llm::Find(item, "task")->string_value(),
            .length = static_cast<std::uint32_t>(*llm::Count(item, "length")),
            .depth = *llm::Number(item, "depth"),
            .seed = static_cast<std::uint32_t>(*llm::Count(item, seed))};
  }
  static Tokens TokensOf(const llm::Json& item, const std::string& key) {
    Tokens tokens;
    for (const auto& value : llm::Find(item, key)->list_value().values()) {
      tokens.push_back(static_cast<TokenId>(value.number_value()));
    }
    return tokens;
  }

  llm::Vocab vocab_;
  std::optional<RecallTasks> tasks_;
  llm::Json golden_;
};

TEST_F(RecallSamples, AreThoseOfTheGenerator) {
  EXPECT_EQ(Golden("samples").size(), 8);
  for (const auto& value : Golden("samples")) {
    const auto sample = tasks_->Sample(QueryOf(value.struct_value(), "seed"));
    ASSERT_TRUE(sample.ok()) << sample.status();
    EXPECT_EQ(vocab_.Decode(sample->prompt),
              vocab_.Decode(TokensOf(value.struct_value(), "prompt")));
    EXPECT_EQ(vocab_.Decode(sample->answer),
              vocab_.Decode(TokensOf(value.struct_value(), "answer")));
  }
}

TEST_F(RecallSamples, HaveTheGeneratorsHashes) {
  EXPECT_EQ(Golden("hashes").size(), 8 * 4 * 4);
  for (const auto& value : Golden("hashes")) {
    RecallQuery query = QueryOf(value.struct_value(), "first_seed");
    std::uint64_t hash = 0xcbf29ce484222325;
    for (std::uint64_t i = *llm::Count(value.struct_value(), "seeds"); i > 0; --i, ++query.seed) {
      const auto sample = tasks_->Sample(query);
      ASSERT_TRUE(sample.ok()) << sample.status();
      for (const Tokens& tokens : {sample->prompt, sample->answer}) {
        for (const TokenId token : tokens) hash = (hash ^ token) * 0x100000001b3;
      }
    }
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    EXPECT_EQ(text, llm::Find(value.struct_value(), "hash")->string_value())
        << query.task << " " << query.length << " " << query.depth;
  }
}

TEST_F(RecallSamples, EndInTheQuestionAndFillTheLength) {
  TestRandom random;
  const Tokens end = *vocab_.Encode("? answer :");
  for (const char* const name : RecallTasks::Names()) {
    const RecallQuery query = {.task = name,
                               .length = static_cast<std::uint32_t>(random.Between(512, 2304)),
                               .depth = static_cast<double>(random.Below(1001)) / 1000,
                               .seed = static_cast<std::uint32_t>(random.Bits())};
    const auto sample = tasks_->Sample(query);
    ASSERT_TRUE(sample.ok()) << sample.status();
    const Tokens& prompt = sample->prompt;
    EXPECT_TRUE(std::equal(end.begin(), end.end(), prompt.end() - 3));
    EXPECT_EQ(prompt[prompt.size() - sample->question_tokens], 9u);  // the line break
    const std::size_t tokens = prompt.size() + sample->answer.size();
    EXPECT_LE(tokens, query.length);
    EXPECT_GE(tokens + 20, query.length);  // the longest sentence of the filler has 15
  }
}

TEST_F(RecallSamples, WhatIsOutOfRangeIsNamed) {
  const auto refusal = [&](const RecallQuery& query) {
    const absl::Status status = tasks_->Sample(query).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({.task = "niah"}), HasSubstr("niah_single, niah_multikey"));
  EXPECT_THAT(refusal({.task = "vt1", .length = 127}),
              HasSubstr("127; it must be from 128 to 2304"));
  EXPECT_THAT(refusal({.task = "vt1", .length = 2305}), HasSubstr("2305"));
  EXPECT_THAT(refusal({.task = "vt1", .depth = 1.5}), HasSubstr("1.5"));
}

}  // namespace
}  // namespace tessera::cli::eval
