// The forward pass compared with an independent float32 implementation: tests/golden/recall.

#include "client/model/model.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "client/model/checkpoint/json.h"
#include "client/model/sampler.h"
#include "kernels/format/element.h"

namespace tessera::llm {
namespace {

const std::string kFolder = TESSERA_RECALL_FOLDER;

// Records the rows of every layer of the last pass, and attends over its own cache.
class Watched final : public Attention {
 public:
  explicit Watched(const Config& config) : own_(config) {}
  absl::Status Attend(const LayerRows& rows, std::span<float> output) override {
    rows_["q"].emplace_back(rows.query.begin(), rows.query.end());
    rows_["k"].emplace_back(rows.key.begin(), rows.key.end());
    rows_["v"].emplace_back(rows.value.begin(), rows.value.end());
    return own_.Attend(rows, output);
  }
  // [layer]
  const std::vector<std::vector<std::uint16_t>>& rows(const std::string& what) {
    return rows_[what];
  }

 private:
  LocalAttention own_;
  std::map<std::string, std::vector<std::vector<std::uint16_t>>> rows_;
};

std::vector<double> Numbers(const Json& object, const std::string& key) {
  std::vector<double> numbers;
  for (const JsonValue& value : Find(object, key)->list_value().values()) {
    numbers.push_back(value.number_value());
  }
  return numbers;
}

std::vector<TokenId> TokensOf(const Json& object, const std::string& key) {
  const std::vector<double> numbers = Numbers(object, key);
  return {numbers.begin(), numbers.end()};
}

class GoldenModel : public testing::Test {
 protected:
  void SetUp() override {
    auto model = Model::Load(kFolder);
    ASSERT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    auto golden = ReadJsonFile(kFolder + "/golden.json");
    ASSERT_TRUE(golden.ok()) << golden.status();
    for (const JsonValue& prompt : Find(*golden, "prompts")->list_value().values()) {
      prompts_.push_back(prompt.struct_value());
    }
    ASSERT_EQ(prompts_.size(), 3u);
  }
  std::vector<float> Forward(std::span<const TokenId> tokens, std::uint32_t first,
                             Attention& attention) {
    std::vector<std::uint32_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), first);
    const std::uint32_t last[] = {static_cast<std::uint32_t>(tokens.size() - 1)};
    auto logits =
        model_->Forward({.tokens = tokens, .positions = positions, .logits_of = last}, attention);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return *std::move(logits);
  }

  std::unique_ptr<Model> model_;
  std::vector<Json> prompts_;
};

TEST_F(GoldenModel, LogitsAreThoseOfTheReference) {
  for (const Json& prompt : prompts_) {
    LocalAttention own(model_->config());
    const std::vector<float> logits = Forward(TokensOf(prompt, "ids"), 0, own);
    const std::vector<double> golden = Numbers(prompt, "logits");
    ASSERT_EQ(logits.size(), golden.size());
    double worst = 0, most = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      worst = std::max(worst, std::abs(logits[i] - golden[i]));
      most = std::max(most, std::abs(golden[i]));
    }
    // Here Q, K and V are rounded to bf16 with its 8 bits; those of the reference are not.
    EXPECT_LT(worst, most * 0x1p-8) << most;
    RecordProperty("worst", std::to_string(worst / most));
    std::printf("logits: worst error %.2g of the largest, %.3g\n", worst / most, most);
    EXPECT_EQ(Sampler({}).Choose(logits), TokensOf(prompt, "answer")[0]);
  }
}

TEST_F(GoldenModel, RowsAreThoseOfTheReference) {
  for (const Json& prompt : prompts_) {
    Watched watched(model_->config());
    Forward(TokensOf(prompt, "ids"), 0, watched);
    std::map<std::string, double> worst;
    for (const JsonValue& item : Find(prompt, "rows")->list_value().values()) {
      const Json& row = item.struct_value();
      const std::string what = Find(row, "what")->string_value();
      const std::uint64_t layer = *Count(row, "layer");
      const std::size_t heads =
          what == "q" ? model_->config().query_heads : model_->config().kv_heads;
      const std::size_t at = (*Count(row, "token") * heads + *Count(row, "head")) * 128;
      const std::vector<double> golden = Numbers(row, "values");
      ASSERT_EQ(golden.size(), 128u);
      double most = 0, error = 0;
      for (std::size_t i = 0; i < golden.size(); ++i) {
        const double got = kernels::Bf16ToFloat(watched.rows(what)[layer][at + i]);
        most = std::max(most, std::abs(golden[i]));
        error = std::max(error, std::abs(got - golden[i]));
      }
      worst[what] = std::max(worst[what], error / most);
      // Layer 0 does not depend on the cache: its rows are the reference's, rounded once to 8 bits.
      // Later layers inherit the rounding of the attention before them.
      EXPECT_LE(error, most * (layer == 0 ? 0x1.02p-8 : 0x1p-7)) << what << " of layer " << layer;
    }
    for (const auto& [what, error] : worst) std::printf("%s: worst %.2g\n", what.c_str(), error);
  }
}

TEST_F(GoldenModel, AnswersTheGoldenQuestionsTokenByToken) {
  for (const Json& prompt : prompts_) {
    const std::vector<TokenId> ids = TokensOf(prompt, "ids"), answer = TokensOf(prompt, "answer");
    LocalAttention own(model_->config());
    std::vector<float> logits = Forward(ids, 0, own);
    std::vector<TokenId> chosen;
    while (true) {
      chosen.push_back(Sampler({}).Choose(logits));
      if (chosen.size() == answer.size()) break;
      const auto position = static_cast<std::uint32_t>(ids.size() + chosen.size() - 1);
      logits = Forward(std::span(chosen).last(1), position, own);
    }
    EXPECT_EQ(chosen, answer);
  }
}

TEST_F(GoldenModel, WhatTheModelDoesNotHaveIsRefused) {
  LocalAttention own(model_->config());
  const auto status = [&](TokenId token, std::uint32_t position) {
    const TokenId tokens[] = {token};
    const std::uint32_t positions[] = {position};
    return model_->Forward({.tokens = tokens, .positions = positions}, own).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(status(768, 0))) << status(768, 0);
  EXPECT_TRUE(absl::IsOutOfRange(status(1, 2304))) << status(1, 2304);
  EXPECT_TRUE(status(767, 2303).ok());
  EXPECT_TRUE(absl::IsNotFound(Model::Load("/nowhere").status()));
}

}  // namespace
}  // namespace tessera::llm
