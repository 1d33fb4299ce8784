// GGUF files: the same model as a GGUF file and as safetensors gives the same logits, and files
// that contradict themselves are refused.

#include "client/model/checkpoint/gguf.h"

#include <gmock/gmock.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "client/model/model.h"
#include "tests/fakes/model/gguf_writer.h"
#include "tests/fakes/model/tiny_model.h"
#include "tests/fakes/seed.h"
#include "tests/unit/client/model/temporary_file.h"

namespace tessera::llm {
namespace {

using testing::HasSubstr;

std::vector<float> LogitsOf(const Model& model, std::span<const TokenId> tokens) {
  std::vector<std::uint32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), 0);
  LocalAttention attention(model.config());
  const auto logits =
      model.Forward({.tokens = tokens, .positions = positions, .logits_of = positions}, attention);
  EXPECT_TRUE(logits.ok()) << logits.status();
  return logits.value_or(std::vector<float>());
}

fakes::TinyModel Tiny(TestRandom& random, const std::string& kind, bool tied) {
  return fakes::TinyModel(kind, tied,
                          [&] { return static_cast<float>(random.Below(2001)) / 5000 - 0.2f; });
}

class Folder {
 public:
  explicit Folder(const fakes::TinyModel& tiny) : path_(testing::TempDir() + "llm-XXXXXX") {
    EXPECT_NE(::mkdtemp(path_.data()), nullptr);
    std::ofstream(path_ + "/config.json") << tiny.Config();
    std::ofstream(path_ + "/model.safetensors") << tiny.Safetensors();
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(GgufModel, ComputesWhatTheSameWeightsInSafetensorsDo) {
  TestRandom random;
  for (const char* const kind : {"llama", "qwen2"}) {
    for (const bool tied : {false, true}) {
      const fakes::TinyModel tiny = Tiny(random, kind, tied);
      const TemporaryFile file(tiny.Gguf().File());
      const Folder folder(tiny);
      const auto one = Model::Load(file.path()), other = Model::Load(folder.path());
      ASSERT_TRUE(one.ok()) << one.status();
      ASSERT_TRUE(other.ok()) << other.status();
      EXPECT_EQ((*one)->config().tied_output, tied);
      std::vector<TokenId> tokens;
      for (int i = 0; i < 40; ++i) tokens.push_back(random.Below(fakes::TinyModel::kVocabulary));
      // The same numbers in the same order: bit for bit.
      EXPECT_EQ(LogitsOf(**one, tokens), LogitsOf(**other, tokens)) << kind;
    }
  }
}

// A bias that is left out, or rows of heads in another order, change the logits by far more.
TEST(GgufModel, EveryPartOfTheModelCounts) {
  TestRandom random;
  fakes::TinyModel tiny = Tiny(random, "qwen2", false);
  std::vector<TokenId> tokens;
  for (int i = 0; i < 20; ++i) tokens.push_back(random.Below(fakes::TinyModel::kVocabulary));
  const auto logits = [&] {
    const TemporaryFile file(tiny.Gguf().File());
    const auto model = Model::Load(file.path());
    EXPECT_TRUE(model.ok()) << model.status();
    return LogitsOf(**model, tokens);
  };
  const std::vector<float> before = logits();
  for (auto& [name, matrix] : tiny.matrices) {
    const fakes::TinyModel::Matrix kept = matrix;
    for (float& value : matrix.values) value += 0.5f * value + 0.1f;
    // A key's bias shifts all logits of a query alike, but for RoPE.
    const std::vector<float> after = logits();
    double most = 0;
    for (std::size_t i = 0; i < after.size(); ++i) {
      most = std::max<double>(most, std::abs(after[i] - before[i]));
    }
    EXPECT_GT(most, 1e-4) << name;
    matrix = kept;
  }
}

TEST(Gguf, ValuesOfEveryKind) {
  const TemporaryFile file(fakes::GgufWriter()
                               .Text("text", "a")
                               .Count("count", 7)
                               .Number("number", 0.5)
                               .Texts("texts", {"b", ""})
                               .Counts("counts", {-1, 2})
                               .F32("matrix", {2, 1}, {3, 4})
                               .File());
  const auto gguf = Gguf::Open(file.path());
  ASSERT_TRUE(gguf.ok()) << gguf.status();
  EXPECT_EQ(gguf->Text("text").value(), "a");
  EXPECT_EQ(gguf->Count("count").value(), 7u);
  EXPECT_EQ(gguf->Number("number").value(), 0.5);
  EXPECT_EQ(std::get<std::vector<std::string_view>>(*gguf->FindValue("texts")).size(), 2u);
  EXPECT_EQ(std::get<std::vector<std::int64_t>>(*gguf->FindValue("counts"))[0], -1);
  ASSERT_NE(gguf->FindTensor("matrix"), nullptr);
  float value = 0;
  gguf->FindTensor("matrix")->ReadRow(1, {&value, 1});
  EXPECT_EQ(value, 4);
  EXPECT_THAT(std::string(gguf->Count("text").status().message()), HasSubstr("whole number"));
  EXPECT_THAT(std::string(gguf->Text("none").status().message()), HasSubstr("\"none\" is missing"));
}

TEST(Gguf, FilesThatContradictThemselvesAreRefused) {
  const auto refusal = [](const std::string& content) {
    const TemporaryFile file(content);
    const auto gguf = Gguf::Open(file.path());
    EXPECT_TRUE(absl::IsInvalidArgument(gguf.status())) << gguf.status();
    return std::string(gguf.status().message());
  };
  const std::string whole = fakes::GgufWriter().Count("a", 1).F32("t", {2}, {1, 2}).File();
  EXPECT_THAT(refusal(""), HasSubstr("0 bytes"));
  EXPECT_THAT(refusal("GGML" + whole.substr(4)), HasSubstr("not a GGUF file"));
  EXPECT_THAT(refusal(whole.substr(0, 4) + "\x09" + whole.substr(5)), HasSubstr("version 9"));
  EXPECT_THAT(refusal(whole.substr(0, 30)), HasSubstr("the header ends at byte 30"));
  EXPECT_THAT(refusal(whole.substr(0, whole.size() - 30)), HasSubstr("tensor \"t\" needs"));
  EXPECT_THAT(refusal(fakes::GgufWriter().Count("a", 1).Count("a", 1).File()), HasSubstr("twice"));
  EXPECT_THAT(refusal(fakes::GgufWriter().Tensor("t", {2}, 99, "").File()), HasSubstr("type 99"));
  EXPECT_THAT(refusal(fakes::GgufWriter().Tensor("t", {40}, 2, std::string(40, 'a')).File()),
              HasSubstr("whole blocks of 32"));
  EXPECT_THAT(
      refusal(fakes::GgufWriter().Tensor("t", {1ull << 40, 1ull << 40, 1ull << 40}, 0, "").File()),
      HasSubstr("needs"));
}

TEST(GgufModel, ModelsThatAreNotSupportedAreRefusedByName) {
  TestRandom random;
  fakes::TinyModel tiny = Tiny(random, "llama", true);
  const auto refusal = [](const std::string& content) {
    const TemporaryFile file(content);
    const auto model = Model::Load(file.path());
    EXPECT_FALSE(model.ok());
    return std::string(model.status().message());
  };
  EXPECT_THAT(refusal(fakes::GgufWriter().Text("general.architecture", "bert").File()),
              HasSubstr("architecture \"bert\""));
  EXPECT_THAT(refusal(tiny.Gguf().Text("llama.rope.scaling.type", "yarn").File()),
              HasSubstr("scaled RoPE"));
  EXPECT_THAT(refusal(tiny.Gguf().Count("llama.expert_count", 8).File()), HasSubstr("experts"));
  EXPECT_THAT(refusal(tiny.Gguf().Count("llama.rope.dimension_count", 4).File()),
              HasSubstr("RoPE of 4 of 8"));
  tiny.matrices.erase("model.layers.1.mlp.up_proj.weight");
  EXPECT_THAT(refusal(tiny.Gguf().File()), HasSubstr("no tensor \"blk.1.ffn_up.weight\""));
}

}  // namespace
}  // namespace tessera::llm
