// Words, byte-pair merges and chat prompts, against rules written down again here.

#include "client/model/checkpoint/tokenizer.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "client/model/checkpoint/bpe.h"
#include "client/model/checkpoint/word_split.h"
#include "tests/fakes/model/tiny_model.h"
#include "tests/fakes/seed.h"
#include "tests/unit/client/model/temporary_file.h"

namespace tessera::llm {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(WordSplit, AsTheRegularExpressionsDo) {
  const auto gpt2 = [](std::string_view text) { return SplitWords(WordSplit::kGpt2, text); };
  EXPECT_THAT(gpt2("Hello world"), ElementsAre("Hello", " world"));
  EXPECT_THAT(gpt2("it's we'LL"), ElementsAre("it", "'s", " we", "'", "LL"));
  EXPECT_THAT(gpt2("a  b\n\n c"), ElementsAre("a", " ", " b", "\n\n", " c"));
  EXPECT_THAT(gpt2("a\tb  "), ElementsAre("a", "\t", "b", "  "));
  EXPECT_THAT(gpt2("x=12.5; y"), ElementsAre("x", "=", "12", ".", "5", ";", " y"));
  EXPECT_THAT(gpt2("na\xC3\xAFve \xE4\xB8\xAD\xE6\x96\x87!"),
              ElementsAre("na\xC3\xAFve", " \xE4\xB8\xAD\xE6\x96\x87", "!"));
  EXPECT_THAT(gpt2(""), ElementsAre());

  const auto smollm = [](std::string_view text) { return SplitWords(WordSplit::kSmolLm, text); };
  EXPECT_THAT(smollm("in 1984, a"), ElementsAre("in", " ", "1", "9", "8", "4", ",", " a"));
  EXPECT_THAT(smollm("x  7"), ElementsAre("x", "  ", "7"));

  const auto qwen2 = [](std::string_view text) { return SplitWords(WordSplit::kQwen2, text); };
  EXPECT_THAT(qwen2("we'LL (see)\n x1"), ElementsAre("we", "'LL", " (", "see", ")\n", " x", "1"));
  EXPECT_THAT(qwen2("a \n  \nb"), ElementsAre("a", " \n  \n", "b"));
  EXPECT_THAT(qwen2("a   b\tc"), ElementsAre("a", "  ", " b", "\tc"));
}

TEST(WordSplit, WordsAreTheTextWhateverItsBytes) {
  TestRandom random;
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (std::uint64_t i = random.Below(40); i > 0; --i) {
      text +=
          random.OneIn(2) ? static_cast<char>(random.Below(256)) : " a'1\n\tst."[random.Below(9)];
    }
    for (const WordSplit split : {WordSplit::kGpt2, WordSplit::kSmolLm, WordSplit::kQwen2}) {
      std::string joined;
      for (const std::string_view word : SplitWords(split, text)) {
        ASSERT_FALSE(word.empty());
        joined += word;
      }
      ASSERT_EQ(joined, text);
    }
  }
}

// Letters a to d, and random merges of what exists already.
Bpe::Parts RandomParts(TestRandom& random) {
  Bpe::Parts parts = {.tokens = {"a", "b", "c", "d"}};
  for (int i = 0; i < 20; ++i) {
    const std::string left = parts.tokens[random.Below(parts.tokens.size())];
    const std::string right = parts.tokens[random.Below(parts.tokens.size())];
    if (std::ranges::find(parts.tokens, left + right) != parts.tokens.end()) continue;
    parts.tokens.push_back(left + right);
    parts.merges.emplace_back(left, right);
  }
  parts.is_control.resize(parts.tokens.size());
  return parts;
}

// The definition: merge the leftmost of the most urgent pairs until none is left.
std::vector<std::string> MergedByDefinition(const Bpe::Parts& parts, const std::string& word) {
  std::vector<std::string> symbols;
  for (const char c : word) symbols.emplace_back(1, c);
  while (true) {
    std::size_t best = parts.merges.size(), at = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto it = std::ranges::find(parts.merges, std::pair(symbols[i], symbols[i + 1]));
      const auto rank = static_cast<std::size_t>(it - parts.merges.begin());
      if (rank < best) {
        best = rank;
        at = i;
      }
    }
    if (best == parts.merges.size()) return symbols;
    symbols[at] += symbols[at + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

TEST(BytePairs, MergeByDefinition) {
  TestRandom random;
  for (int round = 0; round < 300; ++round) {
    const Bpe::Parts parts = RandomParts(random);
    const auto bpe = Bpe::Create(parts);
    ASSERT_TRUE(bpe.ok()) << bpe.status();
    std::string word;
    for (std::uint64_t i = random.Below(30); i > 0; --i) word += "abcd"[random.Below(4)];
    const auto tokens = (*bpe)->Encode(word);
    ASSERT_TRUE(tokens.ok()) << tokens.status();
    std::vector<std::string> texts;
    for (const TokenId token : *tokens) texts.push_back(parts.tokens[token]);
    ASSERT_EQ(texts, MergedByDefinition(parts, word)) << word;
  }
}

TEST(BytePairs, OfAGgufFile) {
  TestRandom random;
  const fakes::TinyModel tiny("llama", true, [] { return 0.0f; });
  const TemporaryFile file(tiny.Gguf().File());
  const auto tokenizer = ReadTokenizer(file.path());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT((*tokenizer)->Encode("the the.").value(), ElementsAre(257, 258, '.'));
  EXPECT_EQ((*tokenizer)->stop(), TokenId{260});
  EXPECT_THAT((*tokenizer)->delimiters(), testing::Contains(TokenId{'.'}));
  // Control tokens in a text are text.
  EXPECT_EQ((*tokenizer)->Encode("<|im_end|>")->size(), 10u);
  EXPECT_EQ((*tokenizer)->Decode((*tokenizer)->Prompt("Hi").value()),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n");
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (std::uint64_t i = random.Below(60); i > 0; --i) text += static_cast<char>(random.Bits());
    const auto tokens = (*tokenizer)->Encode(text);
    ASSERT_TRUE(tokens.ok()) << tokens.status();
    ASSERT_EQ((*tokenizer)->Decode(*tokens), text);
  }
}

TEST(BytePairs, VocabulariesThatContradictThemselvesAreRefused) {
  const auto refusal = [](Bpe::Parts parts) {
    parts.is_control.resize(parts.tokens.size());
    const auto bpe = Bpe::Create(std::move(parts));
    EXPECT_TRUE(absl::IsInvalidArgument(bpe.status())) << bpe.status();
    return std::string(bpe.status().message());
  };
  EXPECT_THAT(refusal({}), HasSubstr("0 tokens"));
  EXPECT_THAT(refusal({.tokens = {"a", "a"}}), HasSubstr("two tokens have the text \"a\""));
  EXPECT_THAT(refusal({.tokens = {"a", "b"}, .merges = {{"a", "b"}}}), HasSubstr("needs three"));
  EXPECT_THAT(refusal({.tokens = {"a"}, .stop = 1}), HasSubstr("token 1"));
  const auto letters = Bpe::Create({.tokens = {"a"}, .is_control = {false}});
  ASSERT_TRUE(letters.ok()) << letters.status();
  EXPECT_THAT(std::string((*letters)->Encode("ab").status().message()), HasSubstr("byte 98"));
}

}  // namespace
}  // namespace tessera::llm
