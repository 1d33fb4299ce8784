// config.json and vocab.json: the recall model's files, and invalid ones with the reason for the
// refusal.

#include <gmock/gmock.h>

#include <string>

#include "client/model/checkpoint/config.h"
#include "client/model/checkpoint/vocab.h"
#include "tests/unit/client/model/temporary_file.h"

namespace tessera::llm {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

const std::string kRecallFolder = TESSERA_RECALL_FOLDER;

std::string Replaced(std::string text, const std::string& what, const std::string& by) {
  const std::size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return text.replace(at, what.size(), by);
}

constexpr char kConfig[] = R"({"vocab_size": 768, "hidden_size": 256, "intermediate_size": 512,
  "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
  "max_position_embeddings": 2304, "rope_theta": 10000.0, "rope_scaling": null,
  "rms_norm_eps": 1e-05, "hidden_act": "silu"})";

absl::Status ConfigStatus(const std::string& text) {
  return ReadConfig(TemporaryFile(text).path()).status();
}

TEST(Files, TheRecallModelsConfig) {
  const auto config = ReadConfig(kRecallFolder + "/config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->vocabulary, 768u);
  EXPECT_EQ(config->query_row(), 512u);
  EXPECT_EQ(config->kv_row(), 256u);
  EXPECT_EQ(config->rope_theta, 10000);
  EXPECT_FALSE(config->tied_output);
  const client::ModelGeometry geometry = GeometryOf(*config, "recall", {3, 9});
  EXPECT_EQ(geometry.layers.size(), 4u);
  EXPECT_EQ(geometry.layers[3].query_heads, 4u);
  EXPECT_THAT(geometry.delimiter_token_ids, ElementsAre(3, 9));
}

TEST(Files, ConfigsThatCannotBeAreRefusedByName) {
  EXPECT_TRUE(ConfigStatus(kConfig).ok()) << ConfigStatus(kConfig);
  const auto refusal = [](const std::string& what, const std::string& by) {
    const absl::Status status = ConfigStatus(Replaced(kConfig, what, by));
    EXPECT_FALSE(status.ok()) << by;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal("\"vocab_size\": 768,", ""), HasSubstr("\"vocab_size\" is missing"));
  EXPECT_THAT(refusal("\"vocab_size\": 768", "\"vocab_size\": -1"), HasSubstr("vocab_size"));
  EXPECT_THAT(refusal("\"head_dim\": 128", "\"head_dim\": 0"),
              AllOf(HasSubstr("head_dim"), HasSubstr("from 1 to 256")));
  EXPECT_THAT(refusal("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"),
              HasSubstr("4 query heads"));
  EXPECT_THAT(refusal("10000.0", "1"), HasSubstr("rope_theta"));
  EXPECT_THAT(refusal("null", "{\"type\": \"yarn\"}"), HasSubstr("rope_scaling"));
  EXPECT_THAT(refusal("silu", "gelu"), HasSubstr("gelu"));
  EXPECT_THAT(refusal("{", "{\"model_type\": \"bert\","), HasSubstr("only llama and qwen2"));
  EXPECT_THAT(refusal("{", "{\"sliding_window\": 16,"), HasSubstr("sliding_window"));
  EXPECT_THAT(refusal("{", "{\"use_sliding_window\": true, \"sliding_window\": 16,"),
              HasSubstr("sliding_window"));
  EXPECT_THAT(refusal("\"head_dim\"", "head_dim\""), HasSubstr("JSON"));
  EXPECT_TRUE(absl::IsNotFound(ReadConfig("/nowhere").status()));
}

// Qwen2's files name a window that is not used, and do not name their biases.
TEST(Files, AConfigOfQwen2) {
  const auto config =
      ReadConfig(TemporaryFile(Replaced(kConfig, "{",
                                        R"({"model_type": "qwen2", "use_sliding_window": false,
                                            "sliding_window": 32768,)"))
                     .path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->qkv_bias);
}

TEST(Files, WhatFollowsFromTheRestMayBeMissing) {
  const std::string text =
      Replaced(Replaced(kConfig, "\"num_key_value_heads\": 2,", "\"model_type\": \"llama\","),
               "\"head_dim\": 128,", "");
  const auto config = ReadConfig(TemporaryFile(text).path());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->kv_heads, 4u);
  EXPECT_EQ(config->head_dim, 64u);
  const absl::Status wide =
      ConfigStatus(Replaced(text, "\"hidden_size\": 256", "\"hidden_size\": 4096"));
  EXPECT_THAT(std::string(wide.message()),
              HasSubstr("\"head_dim\" is 1024; it must be from 1 to 256"));
}

TEST(Files, WordsAndBack) {
  const auto vocab = Vocab::Read(kRecallFolder + "/vocab.json");
  ASSERT_TRUE(vocab.ok()) << vocab.status();
  EXPECT_THAT(vocab->delimiters(), ElementsAre(3, 4, 5, 6, 7, 8, 9));
  const auto tokens = vocab->Encode("  the special number \n  is 7 ");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->size(), 6u);
  EXPECT_EQ(vocab->Decode(*tokens), "the special number \n is 7");
  const TokenId nobodys[] = {20, 767};
  EXPECT_EQ(vocab->Decode(nobodys), "the <767>");
  EXPECT_THAT(std::string(vocab->Encode("the Special").status().message()), HasSubstr("Special"));
}

// A vocabulary without delimiters: words that look like delimiters are used.
TEST(Files, WithoutDelimitersThoseAreTheWordsThatLookLikeIt) {
  const auto vocab = Vocab::Read(
      TemporaryFile(R"({"vocab": {".": 4, "a": 1, ", and": 2, "?!\n": 9, " ": 3, "": 0, "\t": 5}})")
          .path());
  ASSERT_TRUE(vocab.ok()) << vocab.status();
  EXPECT_THAT(vocab->delimiters(), ElementsAre(3, 4, 5, 9));
}

TEST(Files, VocabulariesThatCannotBeAreRefused) {
  const auto refusal = [](const std::string& text) {
    const absl::Status status = Vocab::Read(TemporaryFile(text).path()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal("{}"), HasSubstr("no object \"vocab\""));
  EXPECT_THAT(refusal(R"({"vocab": {"a": 1, "b": 1}})"), HasSubstr("another word"));
  EXPECT_THAT(refusal(R"({"vocab": {"a": "1"}})"), HasSubstr("\"a\""));
  EXPECT_THAT(refusal(R"({"vocab": {"a": 9999999}})"), HasSubstr("9999999"));
}

}  // namespace
}  // namespace tessera::llm
